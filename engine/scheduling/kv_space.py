"""Where the KV of sequences lies, as the scheduler sees it: who gets room, and who gives way."""

from collections.abc import Iterable
from typing import Protocol

from engine.cache.tiers import BlockSpill
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.scheduling.budget import Candidate, PrefillBudget
from engine.sequence import Sequence


class KvSpace(Protocol):
    """One thread at a time, except `prepare`, which touches nothing but its argument.

    A step is planned in this order: `begin`, `plan_decodes`, `find_admissible`, `plan_prefills`,
    `plan`. Sequences come sorted by age; `running` loses those that are preempted.
    """

    @property
    def block_size(self) -> int: ...

    @property
    def num_free_blocks(self) -> int:
        """What could be given, were no step in flight: free or evictable."""

    @property
    def num_blocks(self) -> int: ...

    def require_capacity(self, max_model_len: int) -> None:
        """Raises CacheTooSmall unless a sequence of the full context, alone, can end."""

    def prepare(self, sequence: Sequence) -> None:
        """Hash the full blocks of what is known by now. Idempotent."""

    def begin(self) -> None:
        """A new step: see what came, and what has ended."""

    def plan_decodes(
        self, running: list[Sequence]
    ) -> tuple[list[ScheduledSequence], list[Sequence]]:
        """One token for every decoding sequence; and who was preempted for want of room."""

    def find_prefilling(self, running: Iterable[Sequence]) -> list[Candidate]: ...

    def find_admissible(
        self, waiting: list[Sequence], running: list[Sequence], max_num_sequences: int
    ) -> list[Candidate]: ...

    def plan_prefills(
        self, candidates: list[Candidate], budget: PrefillBudget
    ) -> list[ScheduledSequence]:
        """Admits the waiting candidates that get tokens."""

    def plan(
        self, scheduled: tuple[ScheduledSequence, ...], preempted: tuple[str, ...]
    ) -> ScheduledBatch: ...

    def await_progress(self, timeout_s: float) -> None:
        """After an empty plan: sleep until something came that a sequence waits for."""

    def cached_blocks(self) -> tuple[BlockSpill, ...]:
        """What a cold tier should have before all is gone; nothing without a tier."""

    def register_filled(self, entry: ScheduledSequence) -> None:
        """The entry's step is done: let others find its blocks, unless the sequence lost them."""

    def finish(self, batch: ScheduledBatch) -> None:
        """The device is done with this plan, and with those before it."""

    def release(self, sequence: Sequence) -> None:
        """It has ended, wherever it was: give all it has back. Idempotent."""

    def check_integrity(self, waiting: list[Sequence], running: list[Sequence]) -> None:
        """Raises IntegrityError naming the sequence or block whose books disagree."""
