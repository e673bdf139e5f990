"""What a request asks for beyond text in and text out, and whether a model has it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from router.errors import UnsupportedFeature


class Capability(StrEnum):
    """A model has it when some backend of the model does what the dialect says it does."""

    AUDIO = "audio"
    CODE_EXECUTION = "code_execution"  # containers and what is uploaded to them
    CONTEXT_MANAGEMENT = "context_management"  # compaction, edits, messages that clear themselves
    DOCUMENTS = "documents"
    FALLBACKS = "fallbacks"
    IMAGES = "images"
    INFERENCE_GEO = "inference_geo"
    MODERATION = "moderation"
    PREDICTION = "prediction"
    PREFILL = "prefill"  # the last message is the beginning of the answer
    PROVIDER_TOOLS = "provider_tools"  # the provider defines or runs them; MCP servers
    REFUSALS = "refusals"  # refusals given back as parts of a conversation
    STORE = "store"
    STRUCTURED_OUTPUT = "structured_output"
    TASK_BUDGET = "task_budget"
    TEXT_LOGIT_BIAS = "text_logit_bias"  # keys that are no token ids
    THINKING = "thinking"
    THREADS = "threads"
    TOOLS = "tools"
    WEB_SEARCH = "web_search"


@dataclass(frozen=True, slots=True)
class Feature:
    """One use of a capability. `message`, `param` and `details_code` are those of the refusal, in
    the words of the dialect it was asked in."""

    capability: Capability
    param: str
    message: str
    details_code: str | None = None


class Features:
    """Collects the first use of each capability: no body makes this long."""

    def __init__(self) -> None:
        self._first: dict[Capability, Feature] = {}

    def add(self, feature: Feature) -> None:
        self._first.setdefault(feature.capability, feature)

    def has(self, capability: Capability) -> bool:
        return capability in self._first

    def in_order(self) -> tuple[Feature, ...]:
        return tuple(self._first.values())


def check_features(features: Iterable[Feature], capabilities: frozenset[Capability]) -> None:
    """Raises UnsupportedFeature for the first feature whose capability is missing."""
    for feature in features:
        if feature.capability not in capabilities:
            raise UnsupportedFeature(
                feature.message, param=feature.param, details_code=feature.details_code
            )
