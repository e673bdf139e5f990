"""The plan of one step: which sequences compute how many tokens, and what moves before."""

from dataclasses import dataclass

from engine.cache.tiers import BlockRestore, BlockSpill
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
    def new_token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.end]

    @property
    def block_table(self) -> list[int]:
        return self.sequence.block_table

    @property
    def samples(self) -> bool:
        """The chunk ends at the newest token, and a token is wanted after it."""
        return self.end == self.sequence.num_tokens and self.sequence.params.max_tokens > 0


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """To be executed in this order: copy every block of `spills` out, write every block of
    `restores`, compute. A block can be in both, and in the table of a scheduled sequence."""

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()  # seq ids that lost their blocks to this batch
    spills: tuple[BlockSpill, ...] = ()
    restores: tuple[BlockRestore, ...] = ()

    @property
    def num_batched_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.scheduled)

    @property
    def sampling(self) -> tuple[ScheduledSequence, ...]:
        return tuple(entry for entry in self.scheduled if entry.samples)

    def __bool__(self) -> bool:
        return bool(self.scheduled)
