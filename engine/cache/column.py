"""The keys, or the values, of one sequence: which block of the arena holds each 64 tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.cache.block_address import SequenceAddresses
from engine.cache.formats import Format, Part
from engine.cache.guarded_queue import Ids
from engine.cache.slab_arena import SlabArena


@dataclass(frozen=True, slots=True)
class Demotion:
    """Blocks to write in a denser format, before anything of the same step reads them.

    `sources`, `targets`: [blocks, slabs of a block] slab ids. No target is a source."""

    part: Part
    source_format: Format
    target_format: Format
    sources: Ids
    targets: Ids


class Column:
    """`blocks[i]` holds tokens [64 i, 64 i + 64), and one of its references is ours."""

    def __init__(self, part: Part, arena: SlabArena, addresses: SequenceAddresses) -> None:
        self.part = part
        self.arena = arena
        self.blocks: list[int] = []
        self._addresses = addresses

    def grow(self, num_blocks: int) -> None:
        if num_blocks:
            self.blocks += self.arena.allocate(num_blocks, Format.BF16).tolist()

    def adopt(self, blocks: Sequence[int]) -> None:
        """Share what `find` found, as the first blocks."""
        self.arena.acquire(_ids(blocks))
        self.blocks = list(blocks)

    def register(self, indices: Iterable[int]) -> None:
        """These blocks are in bf16, and full."""
        for index in indices:
            address = self._addresses.of(self.part, index, Format.BF16)
            self._register(self.blocks[index], address)

    def demote(self, indices: range, source: Format, target: Format) -> Demotion | None:
        """Swap our entries, stored as `source`, for canonical copies stored as `target`; the answer
        is how to make those that nobody has made. Whoever shares the old blocks still has them."""
        addresses = [
            self._addresses.of(self.part, index, target, is_requantised=source is Format.INT8)
            for index in indices
        ]
        found = [None if address is None else self.arena.find(address) for address in addresses]
        # Taken first, or `allocate` might evict them.
        self.arena.acquire(_ids(block for block in found if block is not None))
        missing = [offset for offset, block in enumerate(found) if block is None]
        made = self.arena.allocate(len(missing), target)
        if source is Format.BF16:
            self.register(indices)
        old = _ids(self.blocks[indices.start : indices.stop])
        demotion = Demotion(
            self.part,
            source,
            target,
            self.arena.slabs_of(old[missing], source),
            self.arena.slabs_of(made, target),
        )
        for offset, block in zip(missing, made.tolist(), strict=True):
            found[offset] = block
            self._register(block, addresses[offset])
        self.blocks[indices.start : indices.stop] = [block for block in found if block is not None]
        self.arena.release(old)
        return demotion if missing else None

    def slab_ids(self, start: int, end: int, block_format: Format) -> Ids:
        """Of these entries, which are all stored as `block_format`, in the order of tokens."""
        return self.arena.slabs_of(_ids(self.blocks[start:end]), block_format).ravel()

    def close(self) -> None:
        """Give all back. A prefix is useless without its head, so the end is evicted first."""
        self.arena.release(_ids(reversed(self.blocks)))
        self.blocks = []

    def _register(self, block: int, address: bytes | None) -> None:
        if address is not None:
            self.arena.register(block, address, self._addresses.tenant)


def _ids(blocks: Iterable[int]) -> Ids:
    return np.fromiter(blocks, np.int32)
