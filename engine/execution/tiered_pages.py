"""Which blocks of a tiered cache are written into pages of one format, for prompts to attend over.

A chunk of a prompt needs a page for each block before the hot run of its last span, and one for
each that is hot to any of its spans: what was demoted between two spans of a step is needed as both
have it, and the bf16 slabs stay as they are until the step is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.cache.formats import BLOCK_SIZE, MAX_SLABS, Format, Part
from engine.cache.guarded_queue import Ids
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_span import TieredSpan, View
from engine.execution.triton_attention import PagedRows

Run = tuple[int, int, int, Format]  # blocks from, to; where in the column; stored as


@dataclass(frozen=True, slots=True)
class RestoredBlocks:
    """sources [num_blocks, slabs of a block] int32 slabs, stored as `source_format`; pages
    [num_blocks] int32."""

    part: Part
    source_format: Format
    sources: torch.Tensor
    pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedPrompts:
    """Chunks that fit into the pages together, each of their spans a row of the table.

    `tails` [num_tails] int64: places of the pages that follow a chunk's last token in its block."""

    restored: tuple[RestoredBlocks, ...]
    tails: torch.Tensor
    rows: PagedRows


def num_pages_for(config: TierConfig, max_model_len: int, max_num_batched_tokens: int) -> int:
    """That any chunk fits into: of each block one, and one more where the hot run has moved on from
    the first to the last span, which is less than the chunk and a cell."""
    num_moved = max_num_batched_tokens + config.cell_tokens
    return -(-max_model_len // BLOCK_SIZE) + -(-num_moved // BLOCK_SIZE)


def page_prompts(
    chunks: Iterable[Items[TieredSpan]],
    group: int,
    config: TierConfig,
    num_pages: int,
    first_row: int,
) -> tuple[PagedPrompts, ...]:
    """In one layer group; `chunks` are the spans of each, whose tokens are the rows of the step
    from `first_row` on. Tensors are on the host."""
    paged: list[PagedPrompts] = []
    pages = _Pages(config, first_row)
    for spans in chunks:
        views = [span.views[group] for span in spans]
        num_needed = _num_needed(views)
        assert num_needed <= num_pages, (num_needed, num_pages)
        if pages.num_used + num_needed > num_pages:
            paged.append(pages.close())
            pages = _Pages(config, pages.end_row)
        pages.place(spans, views)
    if pages.num_used:
        paged.append(pages.close())
    return tuple(paged)


class _Pages:
    """Filled from the first one on."""

    def __init__(self, config: TierConfig, first_row: int) -> None:
        self.num_used = 0
        self.end_row = first_row
        self._config = config
        self._starts = [first_row]  # of spans, in rows of the step
        self._tables: list[Ids] = []
        self._context_lens: list[int] = []
        self._tails: list[npt.NDArray[np.int64]] = []
        self._sources: dict[tuple[Part, Format], list[Ids]] = defaultdict(list)
        self._pages: dict[tuple[Part, Format], list[Ids]] = defaultdict(list)

    def place(self, spans: Items[TieredSpan], views: Items[View]) -> None:
        num_blocks = _end_block(views[-1])
        before_hot, hot = np.zeros((2, num_blocks), np.int32)  # the page of a block
        for part in Part:
            for start, end, at, stored_as in _runs_before_hot(views[-1], part, self._config):
                before_hot[start:end] = np.arange(start, end) + self.num_used
                slabs = views[-1].slabs(part)[at : at + (end - start) * stored_as.num_slabs]
                self._restore(part, stored_as, slabs, before_hot[start:end])
        self.num_used += _hot_start(views[-1])
        for view, (start, end) in zip(views, _hot_runs(views), strict=True):
            hot[start:end] = np.arange(self.num_used, self.num_used + end - start)
            for part in Part:
                # Hot blocks are the column's last.
                at = len(view.slabs(part)) - MAX_SLABS * (_end_block(view) - start)
                slabs = view.slabs(part)[at : at + MAX_SLABS * (end - start)]
                self._restore(part, Format.BF16, slabs, hot[start:end])
            self.num_used += end - start
        for span, view in zip(spans, views, strict=True):
            first_hot = _hot_start(view)
            own = hot[first_hot : _end_block(view)]
            self._tables.append(np.concatenate((before_hot[:first_hot], own)))
            self._context_lens.append(span.end)
            self.end_row += span.end - span.start
            self._starts.append(self.end_row)
        first_place = int(self._tables[-1][-1]) * BLOCK_SIZE
        tail = np.arange(spans[-1].end % BLOCK_SIZE or BLOCK_SIZE, BLOCK_SIZE, dtype=np.int64)
        self._tails.append(first_place + tail)

    def _restore(self, part: Part, stored_as: Format, slabs: Ids, pages: Ids) -> None:
        if len(pages):
            self._sources[part, stored_as].append(slabs)
            self._pages[part, stored_as].append(pages)

    def close(self) -> PagedPrompts:
        restored = tuple(
            RestoredBlocks(
                part,
                stored_as,
                _joined(self._sources[part, stored_as]).view(-1, stored_as.num_slabs),
                _joined(self._pages[part, stored_as]),
            )
            for part, stored_as in sorted(self._sources)
        )
        lens = [len(table) for table in self._tables]
        tables = np.zeros((len(lens), max(lens)), np.int64)
        for row, table in zip(tables, self._tables, strict=True):
            row[: len(table)] = table
        starts = np.array(self._starts)
        rows = PagedRows(
            slice(self._starts[0], self.end_row),
            torch.from_numpy(tables),
            torch.tensor(self._context_lens),
            torch.from_numpy((starts - starts[0]).astype(np.int32)),
            tuple(np.diff(starts).tolist()),
        )
        return PagedPrompts(restored, _joined(self._tails), rows)


def _num_needed(views: Items[View]) -> int:
    return _hot_start(views[-1]) + sum(end - start for start, end in _hot_runs(views))


def _runs_before_hot(view: View, part: Part, config: TierConfig) -> Iterator[Run]:
    """Sink, cold and warm."""
    start = at = 0
    for bound, stored_as in zip(
        view.bounds[:3], (Format.BF16, config.cold[part], Format.INT8), strict=True
    ):
        end = bound // BLOCK_SIZE
        yield start, end, at, stored_as
        at += (end - start) * stored_as.num_slabs
        start = end


def _hot_runs(views: Items[View]) -> Iterator[tuple[int, int]]:
    """Of each span, the blocks that are hot to it and were not there, or not so, for those before
    it: of a chunk, all that is hot to any."""
    end = 0
    for view in views:
        start, end = max(_hot_start(view), end), max(_end_block(view), end)
        yield start, max(start, end)


def _hot_start(view: View) -> int:
    return view.bounds[2] // BLOCK_SIZE


def _end_block(view: View) -> int:
    return -(-view.bounds[3] // BLOCK_SIZE)


def _joined(parts: Items[npt.NDArray[Any]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))
