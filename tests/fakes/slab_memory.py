"""A GPU's slabs without their bytes: every block holds a number that stands for all that its keys
or values were computed from, so that equal numbers mean equal bytes."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.cache.formats import Format, Part
from engine.cache.kv_arenas import KvArenas
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_table import Span, TieredTable

Slabs = npt.NDArray[np.int32]
NUM_BF16 = Format.BF16.num_slabs
ORDINALS = np.arange(NUM_BF16)


class StoredSequence:
    """A table, the tokens behind it, and what its blocks must hold."""

    def __init__(self, table: TieredTable, token_ids: list[int]) -> None:
        self.table = table
        self.token_ids = token_ids  # as many as the table has, or more
        self.contents: dict[Part, list[int]] = {part: [] for part in Part}
        self.open_content = 0  # of the tokens so far of the part-filled block


class SlabMemory:
    """Runs every span when it is planned, as a stream would in order. Asserts that

    no step in flight can read a slab that is given away; every entry of a table holds what follows
    from its tokens and from what these saw; an address has one content, for ever.
    """

    def __init__(self, arenas: KvArenas, config: TierConfig) -> None:
        self.content_of_address: dict[bytes, int] = {}
        self.num_slabs_written = 0
        self.num_blocks_copied = 0
        self.num_entries_checked = 0
        self._arenas = arenas
        self._config = config
        num_slabs = [arenas.of(part).num_slabs for part in Part]
        self._content = [np.zeros(count, np.int64) for count in num_slabs]
        self._ordinal = [np.zeros(count, np.int64) for count in num_slabs]
        self._last_read = [np.zeros(count, np.int64) for count in num_slabs]

    def adopt(self, sequence: StoredSequence) -> None:
        """Its table begins with blocks of others."""
        for part in Part:
            counts = self._slab_counts(sequence.table, part)
            slabs = sequence.table.slab_ids(part)
            first_slabs = slabs[np.cumsum(counts) - counts]
            sequence.contents[part] = self._content[part][first_slabs].tolist()
        self.check(sequence)

    def extend(self, sequence: StoredSequence, plan: Callable[[], Span]) -> Span:
        """Let `plan` extend the sequence's table, and do what the span says."""
        ages, num_blocks = sequence.table.ages, sequence.table.num_blocks
        span = plan()
        self._copy(span)
        for part in Part:
            contents = sequence.contents[part]
            for index in range(span.first_changed_block, num_blocks):
                was = self._config.format_at(ages, index)[part]
                now = self._config.format_at(span.ages, index)[part]
                contents[index] = _demoted(contents[index], was, now)
        columns = [sequence.table.slab_ids(part) for part in Part]
        self._append(sequence, span, num_blocks, columns)
        self._check(sequence, columns, span.first_changed_block)
        for part in Part:
            self._last_read[part][columns[part]] = self._arenas.epochs.begun
        return span

    def check(self, sequence: StoredSequence) -> None:
        self._check(sequence, [sequence.table.slab_ids(part) for part in Part], 0)

    def _check(self, sequence: StoredSequence, columns: list[Slabs], first_block: int) -> None:
        """All that the columns name, and from `first_block` on the addresses."""
        for part, slabs in zip(Part, columns, strict=True):
            counts = self._slab_counts(sequence.table, part)
            contents = np.array(sequence.contents[part], np.int64)
            ordinals = np.arange(len(slabs)) - np.repeat(np.cumsum(counts) - counts, counts)
            assert (self._content[part][slabs] == np.repeat(contents, counts)).all()
            assert (self._ordinal[part][slabs] == ordinals).all()
            self._check_addresses(sequence, part, first_block)
            self.num_entries_checked += len(counts)

    def _check_addresses(self, sequence: StoredSequence, part: Part, first_block: int) -> None:
        arena, contents = self._arenas.of(part), sequence.contents[part]
        for index, block in enumerate(sequence.table.blocks(part)[first_block:], first_block):
            address = arena.address_of(block)
            if address is not None:
                content = contents[index]
                assert self.content_of_address.setdefault(address, content) == content

    def _copy(self, span: Span) -> None:
        for demotion in span.demotions:
            part, sources, targets = demotion.part, demotion.sources, demotion.targets
            assert sources.shape[1] == demotion.source_format.num_slabs
            assert targets.shape[1] == demotion.target_format.num_slabs
            assert not np.intersect1d(sources, targets).size
            self._last_read[part][sources] = self._arenas.epochs.begun
            for source, target in zip(sources, targets, strict=True):
                content = int(self._content[part][source[0]])
                assert (self._content[part][source] == content).all()
                copied = _demoted(content, demotion.source_format, demotion.target_format)
                self._write_given(part, target, copied)
                self.num_blocks_copied += 1

    def _append(
        self, sequence: StoredSequence, span: Span, num_blocks: int, columns: list[Slabs]
    ) -> None:
        table, block_size = sequence.table, self._config.block_size

        def slabs_of(part: Part, index: int) -> Slabs:
            start = len(columns[part]) - NUM_BF16 * (table.num_blocks - index)
            return columns[part][start : start + NUM_BF16]

        for part in Part:
            for index in range(num_blocks, table.num_blocks):
                self._write_given(part, slabs_of(part, index), 0)
                sequence.contents[part].append(0)
        for index in range(span.start // block_size, table.num_blocks):
            start, end = (
                max(span.start, index * block_size),
                min(span.end, (index + 1) * block_size),
            )
            content = self._compute(sequence, index, start, end)
            for part in Part:
                sequence.contents[part][index] = hash((content, part))
                self._write(part, slabs_of(part, index), hash((content, part)))

    def _compute(self, sequence: StoredSequence, index: int, start: int, end: int) -> int:
        """Tokens [start, end) of block `index`, each from itself and all that it sees."""
        seen = hash(tuple(tuple(sequence.contents[part][:index]) for part in Part))
        is_first = start == index * self._config.block_size
        content = 0 if is_first else sequence.open_content
        for token_id in sequence.token_ids[start:end]:
            content = hash((content, token_id, seen))
        sequence.open_content = content
        return content

    def _write_given(self, part: Part, slabs: Slabs, content: int) -> None:
        assert (self._last_read[part][slabs] <= self._arenas.epochs.finished).all()
        self._write(part, slabs, content)
        self.num_slabs_written += len(slabs)

    def _write(self, part: Part, slabs: Slabs, content: int) -> None:
        self._content[part][slabs] = content
        self._ordinal[part][slabs] = ORDINALS[: len(slabs)]

    def _slab_counts(self, table: TieredTable, part: Part) -> npt.NDArray[np.int64]:
        runs = list(self._config.runs(table.ages, table.num_blocks))
        num_slabs = np.array([run_format[part].num_slabs for _, _, run_format in runs])
        return np.repeat(num_slabs, [end - start for start, end, _ in runs])


def _demoted(content: int, source: Format, target: Format) -> int:
    return content if source is target else hash((content, target))
