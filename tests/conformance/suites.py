"""The parts of the official SDKs' own test suites that our routes must pass, with the number of
tests in each: an SDK that grows, or a suite that collects nothing, must not go unnoticed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suite:
    """`num_tests` counts the sync client twice (loose, strict) and the async one three times (with
    aiohttp too). `keyword` is pytest's `-k`. `base_path` is part of the SDK's base URL."""

    sdk: str
    path: str
    num_tests: int
    keyword: str = ""
    base_path: str = ""
    plugins: tuple[str, ...] = ()


# Written for these versions: with another one installed, read what is new and count again.
VERSIONS = {"anthropic": "2.14.0", "openai": "3.57.0"}

_HTTPX2 = ("tests._alias_httpx",)  # as in the SDK's own configuration: respx must meet httpx2

SUITES = (
    Suite("anthropic", "tests/api_resources/test_messages.py", 65, plugins=_HTTPX2),
    Suite("anthropic", "tests/api_resources/test_models.py", 45, plugins=_HTTPX2),
    # Completions are not stored here: the rest of this file retrieves, updates, lists, deletes.
    Suite("openai", "tests/api_resources/chat/test_completions.py", 40, "create", "/v1"),
    Suite("openai", "tests/api_resources/test_models.py", 35, "not delete", "/v1"),
)

# Keys and names that the suites send.
KEYS = ("my-anthropic-api-key", "My API Key")
MODEL_NAMES = ("claude-opus-5-5", "gpt-6-astra", "model_id")
PAGE_CURSORS = ("after_id", "before_id")
