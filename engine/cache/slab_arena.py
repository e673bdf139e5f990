"""The slabs of the keys, or of the values, of one layer group. Knows ids, never tensors."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.cache.epochs import Epochs
from engine.cache.formats import MAX_SLABS, Format
from engine.cache.guarded_queue import GuardedQueue, Ids
from engine.errors import ArenaExhausted, IntegrityError

MIN_LOOK = 256  # entries of the queue at a time: most of them may be stale


@dataclass(frozen=True, slots=True)
class Evicted:
    """Content that lost its place. It is there until a step writes that is planned from now on."""

    address: bytes
    tenant: bytes
    slabs: Ids


class SlabArena:
    """Reference-counted blocks of 1, 2 or 4 slabs, with a prefix cache over those with an address.

    Slabs are dealt in grains: as many neighbours as a block of `densest` takes, with one metadata
    slot a grain. So any free grain serves any block, wherever it lies: nothing fragments. A block
    is named by its first grain.

    A grain is in exactly one place: in the queue of free ones (some of them still in sight of a
    step in flight) or part of one block. A block is referenced by as many tables as its count says,
    or it is cached, and in the queue of those to evict. Not thread-safe: the scheduler owns it.
    """

    def __init__(
        self,
        num_slabs: int,
        epochs: Epochs,
        densest: Format = Format.INT4,
        *,
        keeps_evicted: bool = False,
    ) -> None:
        self.grain = densest.num_slabs
        self.num_grains = num_slabs // self.grain
        self.densest = densest
        self._free = GuardedQueue(self.num_grains, epochs)
        self._free.append(np.arange(self.num_grains, dtype=np.int32))
        # By the block's first grain. A block of no grains is none.
        self._num_grains_of = np.zeros(self.num_grains, np.uint8)
        self._grains_of = np.zeros((self.num_grains, MAX_SLABS // self.grain), np.int32)
        self._is_held = np.tri(1 + MAX_SLABS // self.grain, MAX_SLABS // self.grain, -1, np.bool_)
        self._ref_counts = np.zeros(self.num_grains, np.int32)
        self._has_address = np.zeros(self.num_grains, np.bool_)
        self._address_of = [b""] * self.num_grains
        self._tenant_of = [b""] * self.num_grains
        self._block_of: dict[bytes, int] = {}
        # A released block's entry counts while the block is unreferenced and knows its position.
        self._released = GuardedQueue(2 * self.num_grains, epochs)
        self._released_at = np.zeros(self.num_grains, np.int64)
        self._num_evictable_grains = 0
        self._keeps_evicted = keeps_evicted
        self._evicted: list[Evicted] = []

    @property
    def num_slabs(self) -> int:
        return self.num_grains * self.grain

    @property
    def num_available_slabs(self) -> int:
        """What `allocate` can give now: free or evictable, and out of sight of steps in flight."""
        released = self._released
        in_sight = self._evictable(released.clear, released.tail)
        num_in_sight = int(self._num_grains_of[in_sight].sum())
        num_grains = self._num_free_grains + self._num_evictable_grains - num_in_sight
        return num_grains * self.grain

    @property
    def num_unreferenced_slabs(self) -> int:
        """What `allocate` could give if no step were in flight."""
        return (len(self._free) + self._num_evictable_grains) * self.grain

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that `find` can find, referenced or not."""
        return len(self._block_of)

    def allocate(self, num_blocks: int, block_format: Format) -> Ids:
        """Blocks with one reference each. Raises ArenaExhausted, and has taken nothing then."""
        num_grains = self._grains_in(block_format)
        self._make_room(num_blocks * num_grains)
        grains = self._free.pop(num_blocks * num_grains).reshape(num_blocks, num_grains)
        blocks = grains[:, 0].copy()
        self._grains_of[blocks, :num_grains] = grains
        self._num_grains_of.put(blocks, num_grains)
        self._ref_counts.put(blocks, 1)
        return blocks

    def find(self, address: bytes) -> int | None:
        """The block with this content. Takes no reference, so the answer is good only until the
        next `allocate`."""
        return self._block_of.get(address)

    def num_referenced_slabs(self, blocks: Iterable[int]) -> int:
        """Of these blocks, those that somebody has: to share them takes nothing from the others."""
        ids = np.fromiter(blocks, np.int32)
        is_referenced = self._ref_counts.take(ids) > 0
        return int(self._num_grains_of.take(ids)[is_referenced].sum()) * self.grain

    def acquire(self, blocks: Ids) -> None:
        """One more reference for each of these blocks that `find` found, each named once."""
        counts = self._ref_counts.take(blocks)
        self._require(self._has_address.take(blocks), blocks, "is acquired without an address")
        woken = blocks[counts == 0]
        self._num_evictable_grains -= int(self._num_grains_of.take(woken).sum())
        self._ref_counts[blocks] = counts + 1

    def register(self, block: int, address: bytes, tenant: bytes = b"") -> None:
        """The block is full, and computed in a step that is planned. The first block of an address
        is the canonical one; a later twin stays private. Idempotent."""
        if self._block_of.get(address, block) != block:
            return
        if self._has_address[block] and self._address_of[block] != address:
            raise IntegrityError(f"block {block} already holds {self._address_of[block].hex()}")
        self._block_of[address] = block
        self._has_address[block] = True
        self._address_of[block] = address
        self._tenant_of[block] = tenant

    def release(self, blocks: Ids) -> None:
        """Drop one reference of each of these blocks, each named once. Those without another are
        cached if they have an address, to be evicted in this order, and free if not. Raises
        IntegrityError, and has dropped nothing, when one has no reference."""
        counts = self._ref_counts.take(blocks)
        is_last, orphans = counts == 1, blocks
        if np.count_nonzero(is_last) < len(blocks):
            self._require(counts > 0, blocks, "is released more often than it was taken")
            orphans = blocks[is_last]
        self._ref_counts.put(blocks, counts - 1)
        has_address = self._has_address.take(orphans)
        if np.count_nonzero(has_address):
            self._cache(orphans[has_address])
            orphans = orphans[~has_address]
        self._free.append(self._dissolve(orphans))

    def take_evicted(self) -> tuple[Evicted, ...]:
        """What `allocate` has evicted since the last call, if the arena is to keep that."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def address_of(self, block: int) -> bytes | None:
        return self._address_of[block] if self._has_address[block] else None

    def format_of(self, block: int) -> Format:
        num_slabs = int(self._num_grains_of[block]) * self.grain
        return next(f for f in Format if f.num_slabs == num_slabs)

    def slabs_of(self, blocks: Ids, block_format: Format) -> Ids:
        """[len(blocks), slabs of a block] of blocks that are all of this format."""
        grains = self._grains_of.take(blocks, axis=0)[:, : self._grains_in(block_format)]
        return self._slabs_in(grains).reshape(len(blocks), block_format.num_slabs)

    def _slabs_in(self, grains: Ids) -> Ids:
        if self.grain == 1:
            return grains
        slabs: Ids = np.add.outer(grains * self.grain, np.arange(self.grain, dtype=np.int32))
        return slabs.ravel()

    def _grains_in(self, block_format: Format) -> int:
        return block_format.num_slabs // self.grain

    @property
    def _num_free_grains(self) -> int:
        return self._free.clear - self._free.head

    def _make_room(self, num_grains: int) -> None:
        num_missing = num_grains - self._num_free_grains
        if num_missing <= 0:
            return
        victims, position = self._oldest(num_missing)
        if self._num_grains_of.take(victims).sum() < num_missing:
            raise ArenaExhausted(
                f"{num_grains * self.grain} slabs are needed, {self.num_available_slabs} of "
                f"{self.num_slabs} can be had now"
            )
        self._released.pop(position - self._released.head)
        self._evict(victims)

    def _oldest(self, num_grains: int) -> tuple[Ids, int]:
        """The evictable blocks longest unused, with `num_grains` grains or all there are, and
        where in the queue they end."""
        position, clear = self._released.head, self._released.clear
        found: list[Ids] = []
        while num_grains > 0 and position < clear:
            end = min(position + max(num_grains, MIN_LOOK), clear)
            blocks = self._evictable(position, end)
            num_up_to = np.cumsum(self._num_grains_of.take(blocks), dtype=np.int64)
            num_taken = int(np.searchsorted(num_up_to, num_grains)) + 1
            position = end
            if num_taken < len(blocks):
                position = int(self._released_at[blocks[num_taken]])
                blocks = blocks[:num_taken]
            found.append(blocks)
            num_grains -= int(num_up_to[: len(blocks)][-1]) if len(blocks) else 0
        return np.concatenate([np.zeros(0, np.int32), *found]), position

    def _evict(self, blocks: Ids) -> None:
        names = blocks.tolist()
        addresses = [self._address_of[block] for block in names]
        tenants = [self._tenant_of[block] for block in names]
        deque(map(self._block_of.__delitem__, addresses), maxlen=0)
        self._has_address[blocks] = False
        sizes = self._num_grains_of.take(blocks)
        grains = self._dissolve(blocks)
        self._num_evictable_grains -= len(grains)
        self._free.prepend(grains)
        if self._keeps_evicted:
            ends = np.cumsum(sizes, dtype=np.int64) * self.grain
            slabs = np.split(self._slabs_in(grains), ends[:-1])
            self._evicted += map(Evicted, addresses, tenants, slabs)

    def _dissolve(self, blocks: Ids) -> Ids:
        """The grains of what are blocks no more."""
        grains = self._grains_in_blocks(blocks)
        self._num_grains_of.put(blocks, 0)
        return grains

    def _grains_in_blocks(self, blocks: Ids) -> Ids:
        is_held = self._is_held.take(self._num_grains_of.take(blocks), axis=0)
        return self._grains_of.take(blocks, axis=0)[is_held]

    def _cache(self, blocks: Ids) -> None:
        released = self._released
        if len(released) + len(blocks) > released.capacity:
            self._drop_stale_entries()
        self._released_at[blocks] = np.arange(released.tail, released.tail + len(blocks))
        released.append(blocks)
        self._num_evictable_grains += int(self._num_grains_of.take(blocks).sum())

    def _drop_stale_entries(self) -> None:
        released = self._released
        released.keep(self._is_evictable(released.head, released.tail))
        blocks = released.peek(released.head, released.tail)
        self._released_at[blocks] = np.arange(released.head, released.tail)

    def _evictable(self, start: int, end: int) -> Ids:
        return self._released.peek(start, end)[self._is_evictable(start, end)]

    def _is_evictable(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        blocks = self._released.peek(start, end)
        is_cached: npt.NDArray[np.bool_] = self._has_address.take(blocks)
        is_cached &= self._ref_counts.take(blocks) == 0
        is_cached &= self._released_at.take(blocks) == np.arange(start, end)
        return is_cached

    def _require(self, holds: npt.NDArray[np.bool_], blocks: Ids, contradiction: str) -> None:
        if np.count_nonzero(holds) != len(holds):
            block = blocks[np.argmin(holds)]
            raise IntegrityError(f"block {block} {contradiction}")

    def check_integrity(self, blocks_in_use: Iterable[int]) -> None:
        """Compare the books with all entries of all block tables. Raises IntegrityError naming the
        first block or slab that disagrees."""
        appearances = np.zeros(self.num_grains, np.int32)
        for block, count in Counter(blocks_in_use).items():
            appearances[block] = count
        everything = np.arange(self.num_grains, dtype=np.int32)
        is_counted = self._ref_counts == appearances
        if not is_counted.all():
            block = int(np.argmin(is_counted))
            raise IntegrityError(
                f"block {block} counts {self._ref_counts[block]} references, tables hold "
                f"{appearances[block]}"
            )
        is_block = self._num_grains_of > 0
        is_held = (self._ref_counts > 0) | self._has_address
        self._require(is_block == is_held, everything, "holds slabs for nobody, or none for some")
        self._check_places(everything[is_block])
        self._check_cache(everything[self._has_address])

    def _check_places(self, blocks: Ids) -> None:
        """Every grain is once in the free queue or once in a block."""
        held = self._grains_in_blocks(blocks)
        free = self._free.peek(self._free.head, self._free.tail)
        num_places = np.bincount(np.concatenate((free, held)), minlength=self.num_grains)
        if (num_places != 1).any():
            grain = int(np.argmax(num_places != 1))
            num_times_free = np.count_nonzero(free == grain)
            raise IntegrityError(
                f"slab {grain * self.grain} is {num_times_free} times free and in "
                f"{num_places[grain] - num_times_free} blocks"
            )

    def _check_cache(self, addressed: Ids) -> None:
        for address, block in self._block_of.items():
            if not self._has_address[block] or self._address_of[block] != address:
                raise IntegrityError(
                    f"the prefix map says {address.hex()} is block {block}, the block disagrees"
                )
        if len(addressed) != len(self._block_of):
            raise IntegrityError(
                f"{len(addressed)} blocks have an address, the prefix map knows "
                f"{len(self._block_of)}"
            )
        unreferenced = addressed[self._ref_counts.take(addressed) == 0]
        queued = self._evictable(self._released.head, self._released.tail)
        strays = np.setxor1d(unreferenced, queued)
        if len(strays):
            raise IntegrityError(f"block {strays[0]} is cached and not to be evicted, or the other")
        num_grains = int(self._num_grains_of.take(queued).sum())
        if num_grains != self._num_evictable_grains:
            raise IntegrityError(
                f"{num_grains} slabs' grains are evictable, the sum says "
                f"{self._num_evictable_grains}"
            )
