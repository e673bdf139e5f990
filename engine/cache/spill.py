"""Blocks on their way back from the cold tier: asked for, awaited for a bounded time, then placed
or given up. Never sleeps on its own account, never looks into a payload."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from engine.cache.block_allocator import BlockAllocator
from engine.cache.tiers import BlockRestore, ColdTier, Payload
from engine.errors import IntegrityError

MAX_RESTORE_WAIT_S = 0.5
MAX_RESTORES_PER_STEP = 64  # of an 8B model in bf16 half a GiB: 10 ms of a 55 GB/s link


@dataclass(slots=True)
class Restore:
    """What one waiting sequence asked for. `blocks` follow the first `first_index` blocks of its
    chain; None until the answer is there."""

    ticket: int
    first_index: int
    deadline_s: float
    blocks: tuple[tuple[Payload, ...], ...] | None = None


class Restores:
    """At most one for each waiting sequence, from its first chance of admission to the admission.

    Without a tier nothing is ever awaited or found. Not thread-safe: the scheduler owns it.
    """

    def __init__(
        self,
        tier: ColdTier | None = None,
        *,
        max_wait_s: float = MAX_RESTORE_WAIT_S,
        max_per_step: int = MAX_RESTORES_PER_STEP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._max_wait_s = max_wait_s
        self._max_per_step = max_per_step
        self._num_left = max_per_step  # blocks that this step may still write
        self._clock = clock
        self._by_seq_id: dict[str, Restore] = {}
        self._by_ticket: dict[int, Restore] = {}  # the awaited ones
        self._num_tickets = 0
        self._placed: list[BlockRestore] = []

    @property
    def num_awaited(self) -> int:
        return len(self._by_ticket)

    def collect(self) -> None:
        """A new step: book the answers that came. Those nobody awaits any more are dropped."""
        self._num_left = self._max_per_step
        if self._tier is None or not self._by_ticket:
            return
        for prefix in self._tier.poll():
            restore = self._by_ticket.pop(prefix.ticket, None)
            if restore is not None:
                restore.blocks = prefix.blocks

    def is_awaited(self, seq_id: str, tenant: bytes, chain: Sequence[bytes], num_hits: int) -> bool:
        """Whether blocks of `chain` beyond its first `num_hits` may still come. Asks at the first
        call, and again when the hits before an answer were evicted meanwhile; from the first call
        on the wait is bounded."""
        if self._tier is None:
            return False
        restore = self._by_seq_id.get(seq_id)
        if restore is None:
            deadline_s = self._clock() + self._max_wait_s
            return self._request(seq_id, tenant, chain, num_hits, deadline_s)
        if restore.blocks is None:
            return not self._gave_up(restore)
        has_gap = bool(restore.blocks) and num_hits < restore.first_index
        if has_gap and self._clock() < restore.deadline_s:
            return self._request(seq_id, tenant, chain, num_hits, restore.deadline_s)
        return False

    def is_staged(
        self,
        seq_id: str,
        tenant: bytes,
        chain: Sequence[bytes],
        hits: list[int],
        allocator: BlockAllocator,
    ) -> bool:
        """Whether more was found than this step may write beside running sequences. If so, a part
        is brought into the prefix cache now, and the rest in steps to come."""
        found = self._found(self._by_seq_id.get(seq_id), len(hits))
        if len(found) <= self._num_left:
            self._num_left -= len(found)
            return False
        allocator.acquire(hits)  # or they would be evicted for their own continuation
        hashes = chain[len(hits) :]
        # Up to a later block that is cached already: written again it would be nobody's.
        absent = list(takewhile(lambda h: not allocator.match_prefix([h]), hashes[: len(found)]))
        num_staged = min(len(absent), self._num_left)
        self._num_left -= num_staged
        allocator.free(hits + self._write(found[:num_staged], tenant, hashes, allocator))
        return True

    def num_found(self, seq_id: str, num_hits: int) -> int:
        """How many blocks can be placed behind the first `num_hits` of the chain."""
        return len(self._found(self._by_seq_id.get(seq_id), num_hits))

    def place(
        self,
        seq_id: str,
        tenant: bytes,
        chain: Sequence[bytes],
        num_hits: int,
        allocator: BlockAllocator,
    ) -> list[int]:
        """Allocate and register blocks for what was found behind the first `num_hits` of the
        chain. The step's plan must carry `take_placed`, so that they are written before read."""
        found = self._found(self._by_seq_id.get(seq_id), num_hits)
        self.drop(seq_id)
        return self._write(found, tenant, chain[num_hits:], allocator)

    def take_placed(self) -> tuple[BlockRestore, ...]:
        placed, self._placed = tuple(self._placed), []
        return placed

    def drop(self, seq_id: str) -> None:
        """The sequence is admitted or gone. Idempotent."""
        restore = self._by_seq_id.pop(seq_id, None)
        if restore is not None and restore.blocks is None:
            self._cancel(restore)

    def wait(self, timeout_s: float) -> None:
        """Sleep until an awaited answer is there, `timeout_s` at most; not at all without one."""
        if self._tier is not None and self._by_ticket:
            self._tier.wait(timeout_s)

    def check_integrity(self, waiting: set[str]) -> None:
        """Raises IntegrityError when the books hold anything but restores of `waiting`."""
        awaited = {r.ticket for r in self._by_seq_id.values() if r.blocks is None}
        if not self._by_seq_id.keys() <= waiting or awaited != self._by_ticket.keys():
            raise IntegrityError(
                f"restores of {sorted(self._by_seq_id)} with tickets {sorted(self._by_ticket)} are "
                f"booked, but {sorted(waiting)} wait and tickets {sorted(awaited)} are open"
            )
        if self._placed:
            raise IntegrityError(f"{len(self._placed)} placed blocks are in no plan")

    def _request(
        self, seq_id: str, tenant: bytes, chain: Sequence[bytes], num_hits: int, deadline_s: float
    ) -> bool:
        """False when the hits are the whole chain."""
        if num_hits == len(chain):
            return False
        assert self._tier is not None
        restore = Restore(self._num_tickets, num_hits, deadline_s)
        self._num_tickets += 1
        self._by_seq_id[seq_id] = self._by_ticket[restore.ticket] = restore
        self._tier.request_restore(restore.ticket, tenant, chain[num_hits:])
        return True

    def _write(
        self,
        found: tuple[tuple[Payload, ...], ...],
        tenant: bytes,
        hashes: Sequence[bytes],
        allocator: BlockAllocator,
    ) -> list[int]:
        block_ids = allocator.allocate(len(found))
        for block_id, block_hash, payloads in zip(block_ids, hashes, found, strict=False):
            allocator.register(block_id, block_hash, tenant)
            self._placed.append(BlockRestore(block_id, block_hash, payloads))
        return block_ids

    def _gave_up(self, restore: Restore) -> bool:
        if self._clock() < restore.deadline_s:
            return False
        self._cancel(restore)
        restore.blocks = ()
        return True

    def _cancel(self, restore: Restore) -> None:
        assert self._tier is not None
        del self._by_ticket[restore.ticket]
        self._tier.cancel_restore(restore.ticket)

    @staticmethod
    def _found(restore: Restore | None, num_hits: int) -> tuple[tuple[Payload, ...], ...]:
        """Nothing where a gap in the chain would lie before it."""
        if restore is None or restore.blocks is None or num_hits < restore.first_index:
            return ()
        return restore.blocks[num_hits - restore.first_index :]
