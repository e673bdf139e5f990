"""The words router and backend exchange: a request of token ids, and events of token ids.

Plain frozen dataclasses: they cross processes.
"""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CONTEXT_WINDOW = "context_window"  # the context ran out before the caller's limit
    ABORT = "abort"


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a completion must be. `text` is the JSON schema or the regular expression: the backend
    compiles it, and refuses what it cannot follow."""

    kind: GrammarKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Meaning and ranges as in the engine's sampling parameters; `seed` is always decided here,
    so that any replica repeats the same draw."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion wanted.

    `cache_salt` separates prefix caches of callers who must not see each other's timing; it comes
    from the server's identity of the caller. `grace_s` is how long the generation outlives its
    last reader: 0 for ordinary streams, seconds for resumable ones.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingSettings
    tenant: str = ""
    key_id: str = ""
    cache_salt: str = ""
    priority: int = 0
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """`cached_tokens` are part of `prompt_tokens`, `reasoning_tokens` of `completion_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens `index`, `index + 1`, ... of the completion. Dense and monotone.

    The last event of a generation, and only it, has `finish_reason`; its `usage` is final.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
