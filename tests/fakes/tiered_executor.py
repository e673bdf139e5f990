"""An executor without a model, over slabs without bytes: the slabs of a block hold a number for all
that its keys or values were computed from, so that equal numbers mean equal bytes."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from engine.cache.column import Demotion
from engine.cache.formats import Format, Part
from engine.cache.kv_arenas import KvArenas
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_span import TieredSpan, View
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.scheduling.tenure import ArenaGroup
from engine.sequence import Sequence as EngineSequence
from tests.fakes.executor import FakeExecutor

NUM_BF16 = Format.BF16.num_slabs


class TieredFakeExecutor(FakeExecutor):
    """Fails the test when a sequence would read anything but what follows from its tokens and from
    the formats that each of them saw, by `contents_of`; or when a slab is written that a step which
    is not finished may read."""

    def __init__(self, groups: Sequence[ArenaGroup], **options) -> None:
        super().__init__(groups[0].config.block_size, **options)
        self.num_blocks_checked = 0
        self._groups = [GroupMemory(group.config, group.arenas) for group in groups]
        self._decode_starts: dict[EngineSequence, int | None] = {}

    def _store(self, batch: ScheduledBatch) -> None:
        told = [
            (span, self._contents(entry, span))
            for entry in batch.scheduled
            for span in _spans_of(entry)
        ]
        for number, group in enumerate(self._groups):
            for span, contents in told:
                group.append(span, span.views[number], contents[number])
            for demotion in batch.demotions[number]:
                group.demote(demotion, batch.epoch)
            for span, contents in told:
                group.read(span.views[number], contents[number], batch.epoch)
                self.num_blocks_checked += len(contents[number].keys)

    def _contents(self, entry: ScheduledSequence, span: TieredSpan) -> list["Contents"]:
        sequence = entry.sequence
        if not span.is_decode:
            self._decode_starts[sequence] = None
        elif self._decode_starts.get(sequence) is None:
            self._decode_starts[sequence] = span.start
        tokens = tuple(self._history(entry)[: span.end])
        start = self._decode_starts[sequence]
        return [
            contents_of(tokens, sequence.cache_salt, start, group.config) for group in self._groups
        ]


class Contents:
    """Of the blocks of one sequence, as its newest token sees them."""

    def __init__(self, keys: list[int], values: list[int], formats: list[list[Format]]) -> None:
        self.keys = keys
        self.formats = formats  # by part
        self.of = [keys, values]


class GroupMemory:
    def __init__(self, config: TierConfig, arenas: KvArenas) -> None:
        self.config = config
        self._epochs = arenas.epochs
        num_slabs = [arenas.of(part).num_slabs for part in Part]
        self._content = [np.zeros(count, np.int64) for count in num_slabs]
        self._ordinal = [np.zeros(count, np.int64) for count in num_slabs]
        self._last_read = [np.zeros(count, np.int64) for count in num_slabs]

    def append(self, span: TieredSpan, view: View, contents: Contents) -> None:
        """The bf16 slabs of the blocks that the span's tokens are in."""
        block_size = self.config.block_size
        num_blocks = -(-span.end // block_size)
        for part in Part:
            for block in range(span.start // block_size, num_blocks):
                column = view.slabs(part)
                first = len(column) - NUM_BF16 * (num_blocks - block)
                slabs = column[first : first + NUM_BF16]
                if block * block_size >= span.start:
                    self._require_unread(part, slabs)
                self._content[part][slabs] = contents.of[part][block]
                self._ordinal[part][slabs] = np.arange(NUM_BF16)

    def demote(self, demotion: Demotion, epoch: int) -> None:
        part = demotion.part
        assert demotion.sources.shape[1] == demotion.source_format.num_slabs
        assert demotion.targets.shape[1] == demotion.target_format.num_slabs
        self._last_read[part][demotion.sources] = epoch
        for source, target in zip(demotion.sources, demotion.targets, strict=True):
            self._require_unread(part, target)
            assert (self._content[part][source] == self._content[part][source[0]]).all()
            content = demoted(int(self._content[part][source[0]]), demotion.target_format)
            self._content[part][target] = content
            self._ordinal[part][target] = np.arange(len(target))

    def read(self, view: View, contents: Contents, epoch: int) -> None:
        for part in Part:
            slabs = view.slabs(part)
            counts = np.array([each.num_slabs for each in contents.formats[part]])
            expected = np.repeat(np.array(contents.of[part], np.int64), counts)
            ordinals = np.arange(len(slabs)) - np.repeat(np.cumsum(counts) - counts, counts)
            assert (self._content[part][slabs] == expected).all(), "reads what is not its own"
            assert (self._ordinal[part][slabs] == ordinals).all()
            self._last_read[part][slabs] = epoch

    def _require_unread(self, part: Part, slabs: np.ndarray) -> None:
        is_unread = self._last_read[part][slabs] <= self._epochs.finished
        assert is_unread.all(), "a slab is given away that a step in flight reads"


@lru_cache(maxsize=100_000)
def contents_of(
    tokens: tuple[int, ...], tenant: bytes, decode_start: int | None, config: TierConfig
) -> Contents:
    """What blocks hold once all `tokens` are stored, those from `decode_start` on by decoding: a
    function of these alone, which is what makes a prefix cache right."""
    blocks: list[list[int]] = [[], []]
    ages = config.prefill_ages(0)
    for position, token in enumerate(tokens):
        is_decode = decode_start is not None and position >= decode_start
        seen_ages = config.decode_ages(position) if is_decode else config.prefill_ages(position)
        for index in range(len(blocks[0])):
            for part in Part:
                was = config.format_at(ages, index)[part]
                now = config.format_at(seen_ages, index)[part]
                if was is not now:
                    blocks[part][index] = demoted(blocks[part][index], now)
        ages = seen_ages
        block = position // config.block_size
        for part in Part:
            if block == len(blocks[part]):
                blocks[part].append(hash((part, tenant)))
        seen = hash((tuple(blocks[0]), tuple(blocks[1])))
        for part in Part:
            blocks[part][block] = hash((blocks[part][block], token, seen, part))
    formats = [
        [config.format_at(ages, index)[part] for index in range(len(blocks[0]))] for part in Part
    ]
    return Contents(blocks[0], blocks[1], formats)


def demoted(content: int, target: Format) -> int:
    return hash((content, target))


def _spans_of(entry: ScheduledSequence) -> Iterator[TieredSpan]:
    """Which are the entry's new tokens, one after the other."""
    start = entry.start
    for span in entry.spans:
        assert span.start == start < span.end
        assert span.views[0].bounds[3] == span.end
        start = span.end
        yield span
    assert start == entry.end, "a chunk and its spans end differently"
