"""docs/protocols.md is true: its tables are those of the code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.capabilities import Capability
from router.errors import RouterError
from router.protocols.anthropic.features import BLOCK_CAPABILITIES
from router.protocols.anthropic.parse import parse_messages
from router.protocols.anthropic.schema import CountTokensBody, MessagesBody
from router.protocols.openai.features import PART_CAPABILITIES
from router.protocols.openai.parse import parse_chat
from router.protocols.openai.schema import ChatBody
from tests.unit.router.test_openapi import errors

DOC = (Path(__file__).parents[3] / "docs" / "protocols.md").read_text()
USER = {"role": "user", "content": "Hello"}
NEEDS = re.compile(r"needs? `(\w+)`")

# A value for each field that can have no effect, and one for each that needs something.
CLAUDE_IDLE: dict[str, Any] = {
    "billing_policy": {},
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "diagnostics": {},
    "fallback_credit_token": "x",
    "fallbacks": [],
    "inference_geo": "global",
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "max"},
    "service_tier": "auto",
    "speed": "fast",
    "thinking": {"type": "disabled"},
    "tool_choice": {"type": "none"},
    "tools": [],
}
CLAUDE_NEEDY: dict[str, Any] = {
    "compaction": {"x": 1},
    "container": "c",
    "context_management": {"edits": [{"type": "compact_20260112"}]},
    "inference_geo": "eu",
    "mcp_servers": [{}],
    "output_config": {"format": {"type": "json_schema", "schema": {}}, "task_budget": {}},
    "output_format": {"type": "json_schema", "schema": {}},
    "thinking": {"type": "adaptive"},
    "thread": {"type": "create"},
    "tool_choice": {"type": "any"},
    "tools": [
        {"name": "f", "input_schema": {"type": "object"}},
        {"name": "bash", "type": "bash_20250124"},
    ],
}
OPENAI_IDLE: dict[str, Any] = {
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "safety_identifier": "s",
    "service_tier": "flex",
    "user": "u",
    "verbosity": "low",
    "modalities": ["text"],
    "function_call": "none",
    "functions": [],
    "tool_choice": "auto",
    "tools": [],
    "response_format": {"type": "text"},
    "store": False,
    "stream_options": {"include_obfuscation": True},
}
OPENAI_NEEDY: dict[str, Any] = {
    "audio": {"voice": "v"},
    "modalities": ["audio"],
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "tool_choice": "required",
    "tools": [{"type": "custom", "custom": {}}],
    "logit_bias": {"the": 1},
    "moderation": {"model": "m"},
    "prediction": {"type": "content"},
    "response_format": {"type": "json_object"},
    "store": True,
    "structured_outputs": {"regex": "a+"},
    "web_search_options": {},
}


def section(heading: str) -> str:
    return DOC.partition(f"{heading}\n")[2].partition("\n## ")[0].partition("\n### ")[0]


def rows(heading: str, column: str) -> list[list[str]]:
    """The cells of the table in `heading` whose first column is `column`."""
    table = section(heading).partition(f"| {column} |")[2].partition("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


def described(heading: str, column: str) -> dict[str, str]:
    """The words for each name in the first column."""
    return {
        name: words
        for names, words in rows(heading, column)
        for name in re.findall(r"`(\w+)`", names)
    }


CLAUDE, OPENAI = "### Claude: `POST /v1/messages`", "### OpenAI: `POST /v1/chat/completions`"


@pytest.mark.parametrize(("heading", "body"), [(CLAUDE, MessagesBody), (OPENAI, ChatBody)])
def test_every_field_is_described_and_no_other(heading, body):
    assert described(heading, "field").keys() == body.model_fields.keys()


def test_the_fields_of_counting_are_marked():
    names = " ".join(row[0] for row in rows(CLAUDE, "field"))
    assert set(re.findall(r"`(\w+)`\*", names)) == CountTokensBody.model_fields.keys()


@pytest.mark.parametrize(
    ("heading", "column", "capabilities"),
    [(CLAUDE, "content block", BLOCK_CAPABILITIES), (OPENAI, "content part", PART_CAPABILITIES)],
)
def test_every_kind_of_content_is_described(heading, column, capabilities):
    words = described(heading, column)
    assert words.pop("text") == "effect"
    assert words == {kind: f"needs `{capability}`" for kind, capability in capabilities.items()}


def features(heading: str, name: str, value: object) -> set[str]:
    body = {"model": "m", "messages": [USER], name: value}
    if heading == OPENAI:
        chat = parse_chat(json.dumps(body).encode())
    else:
        chat = parse_messages(json.dumps({"max_tokens": 1, **body}).encode(), "2026-10-21")
    return {feature.capability for feature in chat.features}


@pytest.mark.parametrize(
    ("heading", "name", "value"),
    [(CLAUDE, *item) for item in CLAUDE_IDLE.items()]
    + [(OPENAI, *item) for item in OPENAI_IDLE.items()],
)
def test_what_has_no_effect_asks_for_nothing(heading, name, value):
    assert "no effect" in described(heading, "field")[name]
    assert features(heading, name, value) == set()


@pytest.mark.parametrize(
    ("heading", "name", "value"),
    [(CLAUDE, *item) for item in CLAUDE_NEEDY.items()]
    + [(OPENAI, *item) for item in OPENAI_NEEDY.items()],
)
def test_what_needs_a_capability_asks_for_it(heading, name, value):
    noted = features(heading, name, value)
    assert noted
    assert noted <= set(NEEDS.findall(described(heading, "field")[name]))


@pytest.mark.parametrize(
    ("heading", "idle", "needy"),
    [(CLAUDE, CLAUDE_IDLE, CLAUDE_NEEDY), (OPENAI, OPENAI_IDLE, OPENAI_NEEDY)],
)
def test_no_field_without_effect_or_with_a_need_is_left_untried(heading, idle, needy):
    words = described(heading, "field")
    assert idle.keys() == {name for name in words if "no effect" in words[name]}
    assert needy.keys() == {name for name in words if NEEDS.search(words[name])}


def test_every_capability_is_explained():
    assert set(NEEDS.findall(DOC)) == set(Capability)


def test_the_table_of_errors_is_the_tree():
    table = {row[1]: (row[0], *(cell.strip("`") for cell in row[2:])) for row in error_rows()}
    assert table == {error_type.__name__: mapping(error_type) for error_type in errors()}


def error_rows() -> list[list[str]]:
    return rows("## Errors", "status")


def mapping(error_type: type[RouterError]) -> tuple[str, str, str, str]:
    return (
        str(error_type.status),
        error_type.anthropic_type,
        error_type.openai_type,
        error_type.openai_code or "",
    )
