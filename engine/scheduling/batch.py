"""The plan of one step: which sequences compute how many tokens."""

from dataclasses import dataclass

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_new_tokens` tokens of `sequence`, from `start` on, get their KV in this step."""

    sequence: Sequence
    start: int  # = sequence.num_computed_tokens when the step was planned
    num_new_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """The chunk ends at the newest token, and a token is wanted after it."""
        return self.end == self.sequence.num_tokens and self.sequence.params.max_tokens > 0


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()  # seq ids that lost their blocks to this batch

    @property
    def num_batched_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.scheduled)

    @property
    def sampling(self) -> tuple[ScheduledSequence, ...]:
        return tuple(entry for entry in self.scheduled if entry.samples)

    def __bool__(self) -> bool:
        return bool(self.scheduled)
