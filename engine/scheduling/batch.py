"""The plan of one step: which sequences compute how many tokens, and what moves before."""

from dataclasses import dataclass, field

from engine.cache.column import Demotion
from engine.cache.tiered_span import TieredSpan
from engine.cache.tiers import BlockRestore, BlockSpill
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_new_tokens` tokens of `sequence`, from `start` on, get their KV in this step.

    `samples`: the chunk ends at the newest token, and one is wanted after it. `is_decode`: it is
    nothing but that newest token. Both as things stood when the step was planned. `spans`: of a
    tiered cache, the new tokens one after the other.
    """

    sequence: Sequence
    start: int  # = sequence.num_computed_tokens when the step was planned
    num_new_tokens: int
    spans: tuple[TieredSpan, ...] = ()
    samples: bool = field(init=False)
    is_decode: bool = field(init=False)

    def __post_init__(self) -> None:
        is_last = self.end == self.sequence.num_tokens
        object.__setattr__(self, "samples", is_last and self.sequence.params.max_tokens > 0)
        object.__setattr__(self, "is_decode", self.sequence.is_decoding)

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def new_token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.end]

    @property
    def block_table(self) -> list[int]:
        return self.sequence.block_table


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """To be executed in this order: copy every block of `spills` out, write every block of
    `restores`, compute. A block can be in both, and in the table of a scheduled sequence.

    Of a tiered cache, in each layer: store the new tokens, then make every demotion of the layer's
    group, then attend. `epoch`: the step's number in the books of its arenas.
    """

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...] = ()  # seq ids that lost their blocks to this batch
    spills: tuple[BlockSpill, ...] = ()
    restores: tuple[BlockRestore, ...] = ()
    demotions: tuple[tuple[Demotion, ...], ...] = ()  # by layer group
    epoch: int = 0

    @property
    def num_batched_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.scheduled)

    @property
    def num_decode_tokens(self) -> int:
        return sum(entry.is_decode for entry in self.scheduled)

    @property
    def sampling(self) -> tuple[ScheduledSequence, ...]:
        return tuple(entry for entry in self.scheduled if entry.samples)

    def __bool__(self) -> bool:
        return bool(self.scheduled)
