"""How one sequence is sampled. Validated once, here."""

import math
from dataclasses import dataclass

from engine.errors import InvalidSamplingParams
from engine.grammar import Grammar

MAX_NUM_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one sequence.

    `max_tokens` 0 computes the prompt's KV and samples nothing (a cache warm-up).
    `temperature` 0 is greedy. `top_k` None is off. `seed` and the token's position alone decide
    the random draw, so a resumed or preempted sequence repeats itself.
    A completion with a `grammar` follows it and then ends with one of `stop_token_ids`.
    `num_logprobs` None is off, 0 gives the sampled token's own logprob, n adds the n most likely.
    Raises InvalidSamplingParams.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 0, "max_tokens", "at least 0", self.max_tokens)
        _require(_within(self.temperature, 0.0, math.inf), "temperature", ">= 0", self.temperature)
        _require(self.top_k is None or self.top_k >= 1, "top_k", "at least 1 or None", self.top_k)
        _require(_within(self.top_p, 0.0, 1.0) and self.top_p > 0, "top_p", "in (0, 1]", self.top_p)
        _require(_within(self.min_p, 0.0, 1.0), "min_p", "in [0, 1]", self.min_p)
        _require(
            _within(self.repetition_penalty, 0.0, math.inf) and self.repetition_penalty > 0,
            "repetition_penalty",
            "> 0",
            self.repetition_penalty,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_within(value, -2.0, 2.0), name, "in [-2, 2]", value)
        _require(
            self.num_logprobs is None or 0 <= self.num_logprobs <= MAX_NUM_LOGPROBS,
            "num_logprobs",
            f"in [0, {MAX_NUM_LOGPROBS}] or None",
            self.num_logprobs,
        )
        can_end = self.grammar is None or bool(self.stop_token_ids)
        _require(can_end, "stop_token_ids", "not empty with a grammar", "none")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _within(value: float, low: float, high: float) -> bool:
    return low <= value <= high and not math.isinf(value)


def _require(holds: bool, name: str, expected: str, came: object) -> None:
    if not holds:
        raise InvalidSamplingParams(f"{name} must be {expected}, got {came}")
