"""What a chat request means, whichever dialect it was spoken in."""

from dataclasses import dataclass
from typing import Literal

from router.capabilities import Feature
from router.generation import Grammar

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`max_tokens` None means: whatever the context still holds. `seed` None: the router draws one.

    Ranges of the sampling fields are those of the dialect and have been checked.
    `messages` hold the texts only: whatever else was sent is named in `features`, and a model that
    lacks the capability must not answer. `ignore_eos`: the model's end token ends nothing.
    """

    model: str
    messages: tuple[ChatMessage, ...]
    max_tokens: int | None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    grammar: Grammar | None = None
    ignore_eos: bool = False
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    num_completions: int = 1
    stream: bool = False
    include_usage: bool = False
    features: tuple[Feature, ...] = ()
