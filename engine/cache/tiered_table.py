"""The block table of one sequence whose tokens age: what to allocate, what to demote, what to read.

with a step begun:  table.extend_prefill(n) or table.extend_decode()  -> Span
its kernels:        the span's demotions, then KV of its tokens, then attention over the columns
once it ran:        table.register_filled()
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.cache.block_address import SequenceAddresses
from engine.cache.column import Column, Demotion
from engine.cache.formats import HOT, WARM, BlockFormat, Format, Part
from engine.cache.guarded_queue import Ids
from engine.cache.kv_arenas import KvArenas
from engine.cache.tier_config import Ages, TierConfig
from engine.cache.tiered_span import View
from engine.errors import ArenaExhausted, IntegrityError


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) that see the same formats: `ages` holds for the columns as they are until
    the table is extended again. Entries of blocks before `first_changed_block` are as before."""

    start: int
    end: int
    ages: Ages
    demotions: tuple[Demotion, ...]
    first_changed_block: int


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks that have aged."""

    blocks: range
    source: BlockFormat
    target: BlockFormat


class TieredTable:
    """Owned by one sequence, in one layer group; planned tokens count as stored.

    Between calls every block has the format of its age, and each column's entry is a block of ours.
    """

    def __init__(self, arenas: KvArenas, config: TierConfig, addresses: SequenceAddresses) -> None:
        self.num_tokens = 0
        self.ages = config.prefill_ages(0)
        self._arenas = arenas
        self._config = config
        self._addresses = addresses
        self._columns = [Column(part, arenas.of(part), addresses) for part in Part]
        self._slab_ids: list[Ids | None] = [None, None]  # by part, since the last change
        self._num_registered = 0

    @property
    def num_blocks(self) -> int:
        return len(self._columns[0].blocks)

    @property
    def decode_start(self) -> int | None:
        """Where it began to decode, if it has."""
        return self._addresses.decode_start

    @property
    def bounds(self) -> tuple[int, int, int, int]:
        """The tokens where sink, cold, warm and hot run end, but for the last by whole blocks: one
        that is filled in part is hot."""
        ages, block_size = self.ages, self._config.block_size
        num_full = self.num_tokens // block_size
        sink, cold, warm = (
            min(start, num_full) * block_size
            for start in (ages.cold_start, ages.warm_start, ages.hot_start)
        )
        return sink, cold, warm, self.num_tokens

    @property
    def view(self) -> View:
        return View(self.bounds, self.slab_ids(Part.KEYS), self.slab_ids(Part.VALUES))

    def num_slabs(self, part: Part) -> int:
        return self._config.num_slabs(self.ages, self.num_tokens, part)

    def blocks(self, part: Part) -> tuple[int, ...]:
        return tuple(self._columns[part].blocks)

    def adopt(self, keys: Sequence[int], values: Sequence[int], ages: Ages) -> None:
        """Begin with blocks of a prefix that is cached in these formats. Only an empty table."""
        assert self.num_blocks == 0
        self._columns[Part.KEYS].adopt(keys)
        self._columns[Part.VALUES].adopt(values)
        self.ages = ages
        self.num_tokens = len(keys) * self._config.block_size
        self._num_registered = len(keys)
        self._slab_ids = [None, None]

    def prefill_need(self, num_tokens: int) -> dict[Part, int]:
        """Slabs that `extend_prefill` takes at most."""
        return self._need(*self._prefill_span(num_tokens))

    def decode_need(self) -> dict[Part, int]:
        """Slabs that `extend_decode` takes at most."""
        return self._need(self.num_tokens + 1, self._config.decode_ages(self.num_tokens))

    def extend_prefill(self, num_tokens: int) -> Span:
        """Room for `num_tokens` more tokens of a prompt, or for those up to the end of the grid
        cell. Raises ArenaExhausted, and has changed nothing then."""
        if self._addresses.decode_start is not None:
            raise IntegrityError(f"prefill at {self.num_tokens} of a sequence that has decoded")
        return self._extend(*self._prefill_span(num_tokens))

    def extend_decode(self, num_tokens: int = 1) -> Span:
        """Room for `num_tokens` more decoded tokens, or for those up to the end of the block.
        Raises ArenaExhausted, and has changed nothing then."""
        config, start = self._config, self.num_tokens
        block_end = (start // config.block_size + 1) * config.block_size
        span = self._extend(min(start + num_tokens, block_end), config.decode_ages(start))
        if self._addresses.decode_start is None:
            self._addresses.decode_start = start
        return span

    def register_filled(self) -> None:
        """Let others find the full blocks whose tokens are known by now."""
        num_filled = self.num_tokens // self._config.block_size
        num_known = min(num_filled, len(self._addresses.chain))
        for index in range(self._num_registered, num_known):
            # Those that have aged meanwhile were registered on the way.
            if index < self.ages.cold_start or index >= self.ages.hot_start:
                for column in self._columns:
                    column.register([index])
        self._num_registered = max(self._num_registered, num_known)

    def slab_ids(self, part: Part) -> Ids:
        """The column: int32 slab ids, sink, cold, warm and hot runs one after the other, each block
        as many as its format takes. The same array until the table changes."""
        slab_ids = self._slab_ids[part]
        if slab_ids is None:
            column = self._columns[part]
            slab_ids = self._slab_ids[part] = np.concatenate(
                [
                    column.slab_ids(start, end, run_format[part])
                    for start, end, run_format in self._config.runs(self.ages, self.num_blocks)
                ]
            )
        return slab_ids

    def close(self) -> None:
        """Finished or aborted: give all blocks back; those with an address stay cached."""
        for column in self._columns:
            column.close()
        self.num_tokens = self._num_registered = 0
        self.ages = self._config.prefill_ages(0)
        self._slab_ids = [None, None]

    def _prefill_span(self, num_tokens: int) -> tuple[int, Ages]:
        """Where it ends, and what it sees."""
        config, start = self._config, self.num_tokens
        cell_end = (start // config.cell_tokens + 1) * config.cell_tokens
        return min(start + num_tokens, cell_end), config.prefill_ages(start)

    def _extend(self, end: int, ages: Ages) -> Span:
        if not self._arenas.epochs.is_in_flight:
            raise IntegrityError("a table is extended outside a step: what it frees is unguarded")
        self._require_room(self._need(end, ages))
        moves = list(self._moves_to(ages))
        num_blocks = self.num_blocks
        num_new_blocks = self._num_new_blocks(end)
        demotions = [
            column.demote(move.blocks, source, target)
            for move in moves
            for column in self._columns
            if (source := move.source[column.part]) != (target := move.target[column.part])
        ]
        for column in self._columns:
            column.grow(num_new_blocks)
        first_changed = min([num_blocks, *(move.blocks.start for move in moves)])
        if moves or num_new_blocks:
            self._slab_ids = [None, None]
        span = Span(
            self.num_tokens, end, ages, tuple(d for d in demotions if d is not None), first_changed
        )
        self.num_tokens, self.ages = end, ages
        return span

    def _moves_to(self, ages: Ages) -> Iterator[Move]:
        was, cold = self.ages, self._config.cold
        for blocks, source, target in (
            (range(was.warm_start, min(was.hot_start, ages.warm_start)), WARM, cold),
            (range(was.hot_start, ages.warm_start), HOT, cold),
            (range(max(was.hot_start, ages.warm_start), ages.hot_start), HOT, WARM),
        ):
            if blocks:
                yield Move(blocks, source, target)

    def _num_new_blocks(self, end: int) -> int:
        return -(-end // self._config.block_size) - self.num_blocks

    def _need(self, end: int, ages: Ages) -> dict[Part, int]:
        """Copies that exist cost no more than new ones."""
        num_new_slabs = self._num_new_blocks(end) * Format.BF16.num_slabs
        if ages == self.ages:
            return dict.fromkeys(Part, num_new_slabs)
        moves = list(self._moves_to(ages))
        return {
            part: num_new_slabs
            + sum(
                len(move.blocks) * move.target[part].num_slabs
                for move in moves
                if move.source[part] != move.target[part]
            )
            for part in Part
        }

    def _require_room(self, need: dict[Part, int]) -> None:
        for part, num_slabs in need.items():
            arena = self._arenas.of(part)
            if num_slabs and num_slabs > (num_available := arena.num_available_slabs):
                raise ArenaExhausted(
                    f"{num_slabs} slabs of {part.name.lower()} are needed, {num_available} of "
                    f"{arena.num_slabs} can be had now"
                )

    def check_integrity(self) -> None:
        """Raises IntegrityError naming the block that is not stored as its age says, or holds
        other tokens."""
        for start, end, run_format in self._config.runs(self.ages, self.num_blocks):
            for column in self._columns:
                for index in range(start, end):
                    self._check_entry(column, index, run_format[column.part])

    def _check_entry(self, column: Column, index: int, expected: Format) -> None:
        block = column.blocks[index]
        if column.arena.format_of(block) is not expected:
            raise IntegrityError(
                f"block {block} of {column.part.name.lower()} is "
                f"{column.arena.format_of(block).name}, entry {index} should be {expected.name}"
            )
        address = column.arena.address_of(block)
        if address is not None and not address.startswith(self._addresses.chain[index]):
            raise IntegrityError(f"entry {index} reads block {block}, which holds other tokens")


def check_arenas(arenas: KvArenas, tables: Iterable[TieredTable]) -> None:
    """Raises IntegrityError naming what disagrees in the arenas or in these, all their tables."""
    tables = list(tables)
    for part in Part:
        arenas.of(part).check_integrity(block for table in tables for block in table.blocks(part))
    for table in tables:
        table.check_integrity()
