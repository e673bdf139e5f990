"""The spans of a step over a tiered cache -> its tensors. Rows of decodes come first, then those of
prompts, chunk by chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.cache.column import Demotion
from engine.cache.formats import BLOCK_SIZE, MAX_SLABS, Format, Part
from engine.cache.guarded_queue import Ids
from engine.cache.tier_group import TierGroup
from engine.cache.tiered_span import TieredSpan, View
from engine.execution.inputs import StepInputs, chained
from engine.execution.tiered_pages import PagedPrompts, page_prompts
from engine.execution.uploads import ALIGNMENT, upload_together
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence

SLAB_TOKENS = BLOCK_SIZE // MAX_SLABS  # of a slab of bf16
TABLE_STEP = ALIGNMENT // 4  # so that each row of a table begins as kernels want it

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DemotedBlocks:
    """sources, targets [num_blocks, slabs of a block] int32 slabs."""

    part: Part
    source_format: Format
    target_format: Format
    sources: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class TieredRows:
    """Tokens that decode, one a sequence: the first rows of the step.

    key_tables, value_tables [num_sequences, a multiple of 4] and bounds [num_sequences, 4] int32.
    """

    key_tables: torch.Tensor
    value_tables: torch.Tensor
    bounds: torch.Tensor


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What the layers of one group share. key_slots, value_slots [num_tokens] int64: where new
    tokens go, slab * 16 + offset. `demotions` in the order in which they are to be made."""

    key_slots: torch.Tensor
    value_slots: torch.Tensor
    demotions: tuple[DemotedBlocks, ...]
    decodes: TieredRows | None
    prompts: tuple[PagedPrompts, ...]


@dataclass(frozen=True, slots=True)
class TieredInputs(StepInputs):
    groups: tuple[GroupInputs, ...]


def build_tiered_inputs(
    batch: ScheduledBatch, groups: Items[TierGroup], num_pages: int, device: torch.device
) -> TieredInputs:
    """num_pages: those that prompts attend over."""
    decodes = [entry for entry in batch.scheduled if entry.spans[0].is_decode]
    chunks = [entry for entry in batch.scheduled if not entry.spans[0].is_decode]
    entries = [*decodes, *chunks]
    positions = chained([range(entry.start, entry.end) for entry in entries])
    token_ids = np.fromiter(chain.from_iterable(entry.new_token_ids for entry in entries), np.int64)
    spans = [span for entry in entries for span in entry.spans]

    def group_inputs(number: int, group: TierGroup) -> GroupInputs:
        return GroupInputs(
            _slots(spans, number, Part.KEYS, positions),
            _slots(spans, number, Part.VALUES, positions),
            demoted_blocks(batch.demotions[number] if batch.demotions else ()),
            _decoding([entry.spans[0].views[number] for entry in decodes]),
            page_prompts(
                [entry.spans for entry in chunks], number, group.config, num_pages, len(decodes)
            ),
        )

    inputs = TieredInputs(
        torch.from_numpy(token_ids),
        torch.from_numpy(positions),
        torch.from_numpy(_sampled_rows(batch, entries)),
        tuple(group_inputs(number, group) for number, group in enumerate(groups)),
    )
    return upload_together(inputs, device)


def demoted_blocks(demotions: Iterable[Demotion]) -> tuple[DemotedBlocks, ...]:
    """Like ones together, on the host, those from bf16 first: others may read their targets."""
    kinds: dict[tuple[Format, Part, Format], list[Demotion]] = defaultdict(list)
    for each in demotions:
        kinds[each.source_format, each.part, each.target_format].append(each)
    return tuple(
        DemotedBlocks(
            part,
            source_format,
            target_format,
            torch.from_numpy(np.concatenate([each.sources for each in like])),
            torch.from_numpy(np.concatenate([each.targets for each in like])),
        )
        for (source_format, part, target_format), like in sorted(kinds.items())
    )


def in_all_layers(demoted: DemotedBlocks, group: TierGroup) -> DemotedBlocks:
    """The same blocks of each layer, as `TieredKV.whole` has them."""
    is_keys = demoted.part is Part.KEYS
    num_slabs = group.num_key_slabs if is_keys else group.num_value_slabs
    layers = torch.arange(group.num_layers, dtype=torch.int32, device=demoted.sources.device)
    firsts = num_slabs * layers[:, None, None]
    sources, targets = (
        (firsts + each).flatten(0, 1) for each in (demoted.sources, demoted.targets)
    )
    return replace(demoted, sources=sources, targets=targets)


def decoded_slot(span: TieredSpan, view: View, part: Part) -> int:
    """Where the one token of the span goes."""
    slab = view.slabs(part)[_own_slabs(span, view, part).start]
    return int(slab) * SLAB_TOKENS + span.start % SLAB_TOKENS


def _own_slabs(span: TieredSpan, view: View, part: Part) -> slice:
    """Where in the column the slabs are that the span's tokens go to: its blocks are the last, and
    in bf16."""
    end_block = -(-span.end // BLOCK_SIZE)
    first = len(view.slabs(part)) - MAX_SLABS * end_block  # of block 0, were all in bf16
    return slice(first + span.start // SLAB_TOKENS, first + -(-span.end // SLAB_TOKENS))


def _slots(spans: Items[TieredSpan], group: int, part: Part, positions: Slots) -> torch.Tensor:
    own = [
        span.views[group].slabs(part)[_own_slabs(span, span.views[group], part)] for span in spans
    ]
    firsts = np.cumsum([0, *map(len, own[:-1])])
    starts = np.array([span.start // SLAB_TOKENS for span in spans])
    shifts = np.repeat(firsts - starts, [span.end - span.start for span in spans])
    slabs = np.concatenate(own)[positions // SLAB_TOKENS + shifts].astype(np.int64)
    return torch.from_numpy(slabs * SLAB_TOKENS + positions % SLAB_TOKENS)


def _decoding(views: Items[View]) -> TieredRows | None:
    if not views:
        return None
    return TieredRows(
        _table([view.key_slabs for view in views]),
        _table([view.value_slabs for view in views]),
        torch.tensor([view.bounds for view in views], dtype=torch.int32),
    )


def _table(columns: Items[Ids]) -> torch.Tensor:
    """Padded with slab 0, which is never read as such."""
    table = np.zeros((len(columns), table_width(max(map(len, columns)))), np.int32)
    for row, column in zip(table, columns, strict=True):
        row[: len(column)] = column
    return torch.from_numpy(table)


def table_width(num_slabs: int) -> int:
    return -(-num_slabs // TABLE_STEP) * TABLE_STEP


def _sampled_rows(batch: ScheduledBatch, entries: Items[ScheduledSequence]) -> Slots:
    ends = np.cumsum([entry.num_new_tokens for entry in entries])
    last_rows = {entry.sequence: end - 1 for entry, end in zip(entries, ends, strict=True)}
    return np.array([last_rows[entry.sequence] for entry in batch.sampling], np.int64)
