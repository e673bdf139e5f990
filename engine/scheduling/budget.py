"""How much of its prompt each prefill may compute in one step.

Short prompts pass long ones, and nobody starves: the oldest gets at least half of every budget.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.scheduling.cost_model import CostModel
from engine.sequence import Sequence

AGING = 1 / 16  # seconds of work that a second of waiting is worth
# Attention takes the tokens of a chunk by so many, and a part of a tile as long as all of it: 192
# tokens at a context of 125K took what 256 took, on an H200.
TILE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sequence in its prefill, or a waiting one that can be admitted."""

    sequence: Sequence
    num_wanted: int  # tokens to compute until it decodes, cached and restored ones off

    @property
    def start(self) -> int:
        return self.sequence.num_tokens - self.num_wanted


class PrefillBudget(Protocol):
    """Made for one step, gone with it."""

    def share(self, candidates: list[Candidate]) -> list[int]:
        """Tokens for each of `candidates`, which are sorted by age, oldest first. The oldest gets
        one at least, if the step has room for one."""


@dataclass(slots=True)
class TokenBudget:
    """Prompt tokens that one step may still compute."""

    num_left: int

    def share(self, candidates: list[Candidate]) -> list[int]:
        """The oldest gets half, the rest goes to whoever is nearest to the end of its prompt."""
        wanted = [candidate.num_wanted for candidate in candidates]
        granted = [0] * len(wanted)
        if wanted:
            granted[0] = self._take(min(wanted[0], _half(self.num_left)))
        for index in sorted(range(len(wanted)), key=lambda index: wanted[index] - granted[index]):
            granted[index] += self._take(wanted[index] - granted[index])
        return granted

    def _take(self, num_wanted: int) -> int:
        num_taken = min(num_wanted, self.num_left)
        self.num_left -= num_taken
        return num_taken


@dataclass(slots=True)
class TimeBudget:
    """Prompt tokens that one step may still compute, and the seconds they may take as `costs` has
    it; infinite, and then only the tokens count. `now_s` is on the clock of `arrival_s`."""

    num_left: int
    seconds_left: float
    costs: CostModel
    block_size: int
    now_s: float

    def share(self, candidates: list[Candidate]) -> list[int]:
        """The oldest gets half, and a block even where there is no time for it; the rest goes by
        rank, which is the seconds a prefill still needs, less `AGING` for each second it waits.

        So one that needs R seconds is passed only by what arrives within R / `AGING` after it.
        The oldest has its half, and is not ranked by age: near its end it would hold up others.
        A chunk ends where a block does or the prompt does, and is of whole tiles if it has one.
        """
        if not candidates:
            return []
        granted = [0] * len(candidates)
        granted[0] = self._take_half(candidates[0])
        needed_s = [
            self.costs.predict_chunk(each.num_wanted - num_granted, each.start + num_granted)
            for each, num_granted in zip(candidates, granted, strict=True)
        ]
        waited_s = [0.0, *(self.now_s - each.sequence.arrival_s for each in candidates[1:])]
        ranks = [needed - AGING * waited for needed, waited in zip(needed_s, waited_s, strict=True)]
        for index in sorted(range(len(candidates)), key=ranks.__getitem__):
            num_granted = granted[index]
            granted[index] += self._take(
                candidates[index], num_granted, self.num_left, self.seconds_left
            )
        return granted

    def _take_half(self, oldest: Candidate) -> int:
        num_taken = self._take(oldest, 0, _half(self.num_left), self.seconds_left / 2)
        if num_taken:
            return num_taken
        num_least = self.block_size - oldest.start % self.block_size
        return self._charge(min(num_least, oldest.num_wanted, self.num_left), oldest.start)

    def _take(
        self, candidate: Candidate, num_granted: int, max_tokens: int, max_seconds: float
    ) -> int:
        start = candidate.start + num_granted
        num_wanted = candidate.num_wanted - num_granted
        num_taken = self.costs.largest_chunk(max_seconds, start, min(num_wanted, max_tokens))
        if num_taken < num_wanted:
            whole = self._whole(candidate.start, num_granted + num_taken)
            num_taken = max(0, whole - num_granted)
        return self._charge(num_taken, start)

    def _whole(self, start: int, num_tokens: int) -> int:
        """How many of `num_tokens` from `start` on make whole tiles, or blocks."""
        num_to_block = -start % self.block_size
        size = TILE_TOKENS if num_tokens >= num_to_block + TILE_TOKENS else self.block_size
        return num_tokens - (num_tokens - num_to_block) % size

    def _charge(self, num_tokens: int, start: int) -> int:
        self.num_left -= num_tokens
        self.seconds_left -= self.costs.predict_chunk(num_tokens, start)
        return num_tokens


def _half(num_tokens: int) -> int:
    return -(-num_tokens // 2)
