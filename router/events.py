"""What a completion is made of, once it is text. Protocol encoders are pure folds over these."""

from dataclasses import dataclass

from router.generation import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class TextLogprobs:
    """Logprobs of one token, with the text the token stands for."""

    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """Comes first, once. `usage.completion_tokens` is 0; `cached_tokens` is already exact."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class TextDelta:
    """`text` may be empty when only `logprobs` arrive (a token that completes no character)."""

    text: str
    logprobs: tuple[TextLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Comes last, once. `stop_string` is the one that matched, for FinishReason.STOP_STRING."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None


TextEvent = Started | TextDelta | Finished
