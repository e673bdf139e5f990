"""KV in blocks of one pool, all of one format: as long as a sequence runs, so does each block."""

from collections.abc import Iterable

from engine.cache.block_allocator import BlockAllocator
from engine.cache.spill import Restores
from engine.cache.tiers import BlockSpill
from engine.errors import CacheTooSmall, IntegrityError
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.scheduling.budget import Candidate, PrefillBudget
from engine.scheduling.decode import plan_decodes
from engine.scheduling.prefill import find_admissible, find_prefilling, plan_prefills
from engine.sequence import Sequence


class PagedSpace:
    """As `KvSpace`, over an allocator. `address` names the model and the format of its cache; it
    salts every block hash. With a cold tier behind `restores`, plans say what to spill and to
    restore."""

    def __init__(
        self, allocator: BlockAllocator, address: bytes, restores: Restores | None = None
    ) -> None:
        self._allocator = allocator
        self._address = address
        self._has_cold_tier = restores is not None
        self._restores = restores or Restores()

    @property
    def block_size(self) -> int:
        return self._allocator.block_size

    @property
    def num_free_blocks(self) -> int:
        return self._allocator.num_free_blocks

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    def require_capacity(self, max_model_len: int) -> None:
        num_slots = self.num_blocks * self.block_size
        if num_slots < max_model_len + self.block_size:
            raise CacheTooSmall(
                f"the KV pool holds {self.num_blocks} blocks of {self.block_size} = {num_slots} "
                f"tokens, but one sequence of max_model_len {max_model_len} and a spare block need "
                f"{max_model_len + self.block_size}; raise kv_cache_bytes or lower max_model_len"
            )

    def prepare(self, sequence: Sequence) -> None:
        if self._allocator.enable_prefix_cache:
            sequence.hash_blocks(self._address, self.block_size)

    def begin(self) -> None:
        self._restores.collect()

    def plan_decodes(
        self, running: list[Sequence]
    ) -> tuple[list[ScheduledSequence], list[Sequence]]:
        return plan_decodes(running, self._allocator)

    def find_prefilling(self, running: Iterable[Sequence]) -> list[Candidate]:
        return find_prefilling(running)

    def find_admissible(
        self, waiting: list[Sequence], running: list[Sequence], max_num_sequences: int
    ) -> list[Candidate]:
        return find_admissible(waiting, running, self._allocator, max_num_sequences, self._restores)

    def plan_prefills(
        self, candidates: list[Candidate], budget: PrefillBudget
    ) -> list[ScheduledSequence]:
        return plan_prefills(candidates, budget, self._allocator, self._restores)

    def plan(
        self, scheduled: tuple[ScheduledSequence, ...], preempted: tuple[str, ...]
    ) -> ScheduledBatch:
        evicted = self._allocator.take_evicted()
        return ScheduledBatch(
            scheduled,
            preempted,
            evicted if self._has_cold_tier else (),
            self._restores.take_placed(),
        )

    def await_progress(self, timeout_s: float) -> None:
        self._restores.wait(timeout_s)

    def cached_blocks(self) -> tuple[BlockSpill, ...]:
        return self._allocator.cached() if self._has_cold_tier else ()

    def register_filled(self, entry: ScheduledSequence) -> None:
        sequence = entry.sequence
        filled = range(entry.start // self.block_size, entry.end // self.block_size)
        if filled and sequence.block_table and self._allocator.enable_prefix_cache:
            self.prepare(sequence)
            for index in filled:
                self._allocator.register(
                    sequence.block_table[index], sequence.block_hashes[index], sequence.cache_salt
                )

    def finish(self, batch: ScheduledBatch) -> None:
        """What a later step writes, it writes behind this one."""

    def release(self, sequence: Sequence) -> None:
        self._allocator.free(sequence.block_table)
        self._restores.drop(sequence.seq_id)
        sequence.block_table = []

    def check_integrity(self, waiting: list[Sequence], running: list[Sequence]) -> None:
        self._allocator.check_integrity(sequence.block_table for sequence in running)
        for sequence in waiting:
            if sequence.block_table:
                raise IntegrityError(f"{sequence.seq_id} waits and owns blocks")
        for sequence in running:
            self._check_table(sequence)
        self._restores.check_integrity({sequence.seq_id for sequence in waiting})

    def _check_table(self, sequence: Sequence) -> None:
        num_slots = len(sequence.block_table) * self.block_size
        if num_slots < sequence.num_computed_tokens:
            raise IntegrityError(
                f"{sequence.seq_id} has {sequence.num_computed_tokens} tokens computed in "
                f"{num_slots} slots"
            )
        # The table may be longer than the chain (its last block is not full), and the chain longer
        # than the table (the rest of the prompt); where both are, they agree.
        for block_id, block_hash in zip(sequence.block_table, sequence.block_hashes, strict=False):
            if self._allocator.hash_of(block_id) not in (None, block_hash):
                raise IntegrityError(
                    f"{sequence.seq_id} reads block {block_id}, which holds other tokens"
                )
