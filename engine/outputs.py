"""What a step gives back. Plain values: they cross threads and processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one sequence. `cached_tokens` are part of `prompt_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the raw distribution (before temperature and penalties)."""

    logprob: float  # of the sampled token
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One entry for each sequence of the batch that samples, in batch order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


PendingTokens = Callable[[], SampledTokens]  # waits for them


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence. `usage` is final when `finish_reason` is set."""

    seq_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # empty unless asked for
    finish_reason: FinishReason | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class StepStats:
    num_prefill_tokens: int
    num_decode_tokens: int
    num_waiting: int
    num_running: int
    num_preempted: int
    num_free_blocks: int  # free or evictable
    num_blocks: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class SkipCounts:
    """What decodes over tiers have left out: sums over layers, sequences and steps that only
    decode, but for `greatest_certificate`.

    cold_blocks: a KV head's, of which `read_blocks` had their values read. heads: KV heads that had
    any; `heads_again`: of them, that skipped too much and read more. queries, and their
    `certificates`: the share of its softmax that each has left out, at most.
    """

    cold_blocks: int = 0
    read_blocks: int = 0
    heads: int = 0
    heads_again: int = 0
    queries: int = 0
    certificates: float = 0.0
    greatest_certificate: float = 0.0


@dataclass(frozen=True, slots=True)
class StepOutput:
    outputs: tuple[SequenceOutput, ...]
    stats: StepStats
