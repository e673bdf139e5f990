"""Attention over a cache whose tokens age: decodes read every format where it lies, prompts attend
over pages of one format, into which their blocks are written, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from engine.cache.formats import Part
from engine.execution.decode_attention_graphs import TablesShape
from engine.execution.inputs import Chunks
from engine.execution.kv_tensors import KVTensors
from engine.execution.skipping_decodes import SkippingDecodes
from engine.execution.tiered_decodes import NUM_BOUNDS, Planned, PlannedRows, TieredTables
from engine.execution.tiered_inputs import (
    DemotedBlocks,
    GroupInputs,
    TieredInputs,
    TieredRows,
    build_tiered_inputs,
    decoded_slot,
    demoted_blocks,
    in_all_layers,
)
from engine.execution.tiered_kv import BITS, TieredKV, formats_of
from engine.execution.tiered_pages import PagedPrompts
from engine.execution.tiered_skips import StepSkips
from engine.execution.tiered_slots import TieredSlots
from engine.execution.triton_attention import TritonAttention
from engine.execution.uploads import upload_together
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from kernels.kv_quantise.api import quantise_keys, quantise_values
from kernels.kv_restore.api import restore_keys, restore_values
from kernels.launch import runs_kernels
from kernels.tiered_append.api import tiered_append
from kernels.tiered_decode import reference
from kernels.tiered_decode.api import num_runs_of, tiered_decode
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import Formats


@dataclass(frozen=True)
class GroupMetadata:
    """As `GroupInputs`, ready for every layer of the group. `skips`: of a step that only decodes
    and may skip."""

    key_slots: torch.Tensor
    value_slots: torch.Tensor
    demotions: tuple[DemotedBlocks, ...]
    decodes: TieredRows | None
    prompts: tuple[PagedPrompts, ...]
    planner: Callable[[TieredRows], tuple[PlannedRows, ...]]
    skips: StepSkips | None = None

    @cached_property
    def planned(self) -> tuple[PlannedRows, ...]:
        """The decodes, once a layer asks: those that are recorded have plans of their own."""
        return () if self.decodes is None else self.planner(self.decodes)


TieredMetadata = tuple[GroupMetadata, ...]  # by layer group


class TieredAttention:
    """By the kernels, and on a CPU by their references."""

    def __init__(
        self,
        kv: TieredKV,
        pages: KVTensors,
        prompts: TritonAttention,
        num_heads: int,
        scale: float,
        *,
        deterministic: bool = False,
        skipping: SkippingDecodes | None = None,
    ) -> None:
        """`pages` of one layer, which `prompts` attends over: no layer's own, for each layer writes
        them anew. deterministic: a decode is dealt out alone. skipping: attends in steps that only
        decode."""
        self._kv = kv
        self._pages = pages
        self._prompts = prompts
        self._num_heads = num_heads
        self._scale = scale
        self._deterministic = deterministic
        self.skipping = skipping
        self._formats = [formats_of(group.config) for group in kv.groups]

    def build_inputs(self, batch: Chunks) -> TieredInputs:
        assert isinstance(batch, ScheduledBatch), "a tiered cache has one rank"
        if self.skipping is not None and all(each.spans[0].is_decode for each in batch.scheduled):
            sequences = [each.sequence for each in batch.scheduled]
            self.skipping.begin(sequences, len(sequences))
        return build_tiered_inputs(batch, self._kv.groups, self._pages.num_blocks, self._kv.device)

    def prepare(self, inputs: TieredInputs) -> TieredMetadata:
        pairs = zip(inputs.groups, self._formats, strict=True)
        metadata = tuple(self._prepare_group(group, formats) for group, formats in pairs)
        return metadata if self.skipping is None else self._skipped(metadata, self.skipping)

    @property
    def decode_padding(self) -> tuple[int, ...]:
        return (0, 0, 0, 0, -1, -1) * len(self._formats)

    def decode_rows(self, entries: Items[ScheduledSequence]) -> list[list[int]]:
        """Of each layer group the bounds, and where the token's key and value go."""
        rows: list[list[int]] = []
        for number in range(len(self._formats)):
            pairs = [(entry.spans[0], entry.spans[0].views[number]) for entry in entries]
            rows += [[view.bounds[nth] for _, view in pairs] for nth in range(NUM_BOUNDS)]
            rows += [[decoded_slot(span, view, part) for span, view in pairs] for part in Part]
        return rows

    def begin_decodes(self, batch: ScheduledBatch) -> None:
        """The step's demotions, in all layers of a group at once: no token of this step is among
        what they read, for a block is demoted long after it is full."""
        if any(batch.demotions):
            demotions = tuple(
                tuple(in_all_layers(each, group) for each in demoted_blocks(of_group))
                for group, of_group in zip(self._kv.groups, batch.demotions, strict=True)
            )
            for number, of_group in enumerate(upload_together(demotions, self._kv.device)):
                self._demote_whole(number, of_group)
        if self.skipping is not None:
            self.skipping.begin_recorded([each.sequence for each in batch.scheduled])

    def prepare_decodes(self, slots: TieredSlots, rows: torch.Tensor) -> TieredMetadata:
        """As `engine.execution.decode_graphs.DecodeBackend`."""
        groups = []
        own_rows = rows[3:].chunk(len(self._formats))
        for own, tables, formats in zip(own_rows, slots.tables, self._formats, strict=True):
            decodes = TieredRows(
                tables[Part.KEYS].index_select(0, rows[2]),
                tables[Part.VALUES].index_select(0, rows[2]),
                own[:NUM_BOUNDS].T.to(torch.int32).contiguous(),
            )
            planner = partial(self._planned, formats=formats)
            groups.append(GroupMetadata(own[-2], own[-1], (), decodes, (), planner))
        if self.skipping is None:
            return tuple(groups)
        self.skipping.record(rows.shape[1])
        return self._skipped(groups, self.skipping)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        metadata: TieredMetadata,
    ) -> torch.Tensor:
        """As `engine.models.decoder.Attend`, of values that come rotated: so does the result."""
        group = metadata[self._kv.group_of[layer]]
        planned = group.planned  # before other kernels: it is read by programs that start early
        query = self.append(layer, query, key, value, cos, sin, self.token_rows(metadata))
        self.begin_layer(layer, metadata)
        if self.skipping is not None and group.skips is not None:
            (all_rows,) = planned
            return self.skipping.attend(layer, query, all_rows, group.skips)
        attended = self._attend_planned(layer, query, planned)
        attended += [each for _, each in self.attend_prompts(layer, query, metadata)]
        return _joined(attended)

    def append(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: Items[torch.Tensor],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `engine.execution.layer_graphs.LayerBackend`."""
        first, slabs = len(Part) * self._kv.group_of[layer], self._kv.layers[layer]
        key_slots, value_slots = rows[first : first + len(Part)]
        arenas = slabs.keys, slabs.values, key_slots, value_slots
        return tiered_append(query, key, value, cos, sin, *arenas, out)

    @property
    def row_padding(self) -> tuple[int, ...]:
        return (-1,) * len(Part) * len(self._formats)

    def token_rows(self, metadata: TieredMetadata) -> tuple[torch.Tensor, ...]:
        """Slots of keys and of values, by layer group."""
        return tuple(each for group in metadata for each in (group.key_slots, group.value_slots))

    def decode_tables(self, shape: TablesShape) -> TieredTables:
        """As `engine.execution.decode_attention_graphs.SingleAttention`."""
        return TieredTables(shape, self._planned_groups, self._kv.device)

    @property
    def prompt_attention(self) -> None:
        """As `engine.execution.layer_graphs.LayerBackend`: what is restored for prompts changes."""

    def decodes_of(self, metadata: TieredMetadata) -> list[TieredRows] | None:
        return [each.decodes for each in metadata if each.decodes is not None] or None

    def begin_layer(self, layer: int, metadata: TieredMetadata) -> None:
        """Demotes: of prompts what this very step has appended, too."""
        for demoted in metadata[self._kv.group_of[layer]].demotions:
            demote(self._kv.layers[layer], demoted)

    def attend_decodes(self, layer: int, query: torch.Tensor, decodes: Planned) -> torch.Tensor:
        """As `engine.execution.decode_attention_graphs.SingleAttention`."""
        return _joined(self._attend_planned(layer, query, decodes[self._kv.group_of[layer]]))

    def attend_prompts(
        self, layer: int, query: torch.Tensor, metadata: TieredMetadata
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """As `engine.execution.layer_graphs.LayerBackend`. All of them use the same pages."""
        for prompts in metadata[self._kv.group_of[layer]].prompts:
            yield prompts.rows.rows, self._attend_paged(self._kv.layers[layer], query, prompts)

    def _prepare_group(self, group: GroupInputs, formats: Formats) -> GroupMetadata:
        return GroupMetadata(
            group.key_slots,
            group.value_slots,
            group.demotions,
            group.decodes,
            tuple(
                PagedPrompts(each.restored, each.tails, self._prompts.place_chunks(each.rows))
                for each in group.prompts
            ),
            partial(self._planned, formats=formats),
        )

    def _skipped(self, metadata: Items[GroupMetadata], skipping: SkippingDecodes) -> TieredMetadata:
        """The same, of a step that skips if it only decodes."""
        skipping.find_reach()
        is_mixed = any(group.prompts for group in metadata)
        groups = []
        for number, group in enumerate(metadata):
            whole = [in_all_layers(each, self._kv.groups[number]) for each in group.demotions]
            if is_mixed or group.decodes is None:
                groups.append(group)
                for each in whole:
                    skipping.stored(number, each)
            else:
                self._demote_whole(number, whole)
                skipping.find_reach()
                skips = skipping.prepare(number, group.decodes.bounds)
                groups.append(replace(group, demotions=(), skips=skips))
        return tuple(groups)

    def _demote_whole(self, group: int, demotions: Items[DemotedBlocks]) -> None:
        """Of slabs as `TieredKV.whole` has them."""
        for each in demotions:
            demote(self._kv.whole[group], each)
            if self.skipping is not None:
                self.skipping.stored(group, each)

    def _planned_groups(self, decodes: Items[TieredRows]) -> Planned:
        pairs = zip(decodes, self._formats, strict=True)
        return tuple(self._planned(each, formats) for each, formats in pairs)

    def _planned(self, decodes: TieredRows, formats: Formats) -> tuple[PlannedRows, ...]:
        num_rows = len(decodes.bounds)
        if not runs_kernels(decodes.bounds):
            return (PlannedRows(slice(0, num_rows), decodes, None),)
        step = 1 if self._deterministic else num_rows
        return tuple(
            self._planned_rows(slice(start, start + step), decodes, formats)
            for start in range(0, num_rows, step)
        )

    def _planned_rows(self, rows: slice, decodes: TieredRows, formats: Formats) -> PlannedRows:
        tables = TieredRows(
            decodes.key_tables[rows], decodes.value_tables[rows], decodes.bounds[rows]
        )
        heads = self._num_heads, self._kv.num_kv_heads
        num_runs = num_runs_of(self._kv.device, *heads, size=self._kv.head_dim)
        return PlannedRows(rows, tables, tiered_plan(tables.bounds, num_runs, formats))

    def _attend_planned(
        self, layer: int, query: torch.Tensor, planned: Items[PlannedRows]
    ) -> list[torch.Tensor]:
        slabs, formats = self._kv.layers[layer], self._formats[self._kv.group_of[layer]]
        return [self._attend_rows(slabs, query, each, formats) for each in planned]

    def _attend_rows(
        self, slabs: Slabs, query: torch.Tensor, decodes: PlannedRows, formats: Formats
    ) -> torch.Tensor:
        query, tables = query[decodes.rows], decodes.tables
        columns = tables.key_tables, tables.value_tables
        if decodes.plan is not None:
            return tiered_decode(query, slabs, *columns, decodes.plan, formats, self._scale)[0]
        attended, _ = reference.tiered_decode(
            query, slabs, *columns, tables.bounds, formats, self._scale
        )
        return attended.to(query.dtype)

    def _attend_paged(
        self, slabs: Slabs, query: torch.Tensor, prompts: PagedPrompts
    ) -> torch.Tensor:
        (key_pages,), (value_pages,) = self._pages.keys, self._pages.values
        for each in prompts.restored:
            bits = BITS[each.source_format]
            if each.part is Part.KEYS:
                arena = slabs.keys, slabs.key_meta
                restore_keys(*arena, each.sources, key_pages, each.pages, bits)
            else:
                arena = slabs.values, slabs.value_meta
                restore_values(*arena, each.sources, value_pages, each.pages, bits)
        # What is in a slab behind a sequence's last token may be no number, and FlashAttention
        # multiplies values that it must not see by zero.
        value_pages.flatten(0, 1).index_fill_(0, prompts.tails, 0.0)
        return self._prompts.attend_chunks(0, query, prompts.rows)


def _joined(attended: list[torch.Tensor]) -> torch.Tensor:
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def demote(slabs: Slabs, demoted: DemotedBlocks) -> None:
    blocks = demoted.sources, demoted.targets
    bits = BITS[demoted.source_format], BITS[demoted.target_format]
    if demoted.part is Part.KEYS:
        quantise_keys(slabs.keys, slabs.key_meta, *blocks, *bits)
    else:
        quantise_values(slabs.values, slabs.value_meta, *blocks, *bits)
