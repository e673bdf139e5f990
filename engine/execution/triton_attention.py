"""Attention by the kernels, over the block tables: nothing is gathered and no mask is made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from engine.errors import EngineError
from engine.execution.decode_attention_graphs import TablesShape
from engine.execution.inputs import Chunks, ModelInputs, QuerySpan, build_inputs
from engine.execution.kv_tensors import KVTensors
from engine.execution.recorder import Recorder
from engine.execution.sequence_slots import SequenceSlots
from engine.execution.uploads import upload
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from kernels.paged_decode.api import paged_decode
from kernels.paged_prefill.api import paged_prefill
from kernels.rope_append.api import rope_append

BLOCK_SIZE = 64
HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 256


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Sequences that attend in one launch: one token each, or a chunk each.

    block_tables [num_sequences, max_num_blocks] and context_lens [num_sequences] int64;
    query_starts [num_sequences + 1] int32: where chunks begin among these rows; None of tokens.
    query_lens: of the chunks; none of tokens.
    """

    rows: slice
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor | None = None
    query_lens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkEnds:
    """The newest token of each chunk: rows [num_chunks] int64 among those of the chunks, and what
    it attends to, as in PagedRows."""

    rows: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    @classmethod
    def of(cls, chunks: PagedRows) -> Self:
        assert chunks.query_starts is not None
        return cls(chunks.query_starts[1:].long() - 1, chunks.block_tables, chunks.context_lens)


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """What all layers of a step share. The decodes' rows come before the chunks'. ends: of all that
    the chunks attended in the last layer, no more is looked at; None where it is still to have the
    bits that any other cut of the prompts gives it."""

    slot_mapping: torch.Tensor
    decodes: PagedRows | None
    chunks: PagedRows | None
    ends: ChunkEnds | None = None


class PagedTables:
    """As `engine.execution.decode_attention_graphs.DecodeTables`."""

    def __init__(self, shape: TablesShape, device: torch.device) -> None:
        self._tables = torch.zeros(shape, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(shape[0], dtype=torch.int64, device=device)

    @property
    def most(self) -> int:
        return len(self._tables)

    def record(self, size: int, recorder: Recorder) -> tuple[PagedRows, Callable[[], None]]:
        rows = slice(0, size)
        decodes = PagedRows(rows, self._tables[rows], self._context_lens[rows])
        return decodes, lambda: None

    def place(self, decodes: PagedRows) -> int:
        num_decodes, num_blocks = decodes.block_tables.shape
        self._tables[:num_decodes, :num_blocks].copy_(decodes.block_tables)
        self._context_lens[:num_decodes].copy_(decodes.context_lens)
        self._context_lens[num_decodes:].fill_(0)
        return num_decodes


class TritonAttention:
    """A layer costs the same few launches whatever the batch, and none of them waits."""

    def __init__(
        self,
        kv: KVTensors,
        windows: Iterable[int | None],
        scale: float,
        *,
        deterministic: bool = False,
    ) -> None:
        """`windows` of the layers in order: keys a query sees, None for all. Raises EngineError."""
        if kv.block_size != BLOCK_SIZE:
            raise EngineError(
                f"attention_backend triton needs blocks of {BLOCK_SIZE} tokens, block_size is "
                f"{kv.block_size}; leave it at {BLOCK_SIZE} or choose attention_backend torch"
            )
        head_dim = kv.block_shape[-1]
        if head_dim % HEAD_DIM_STEP or head_dim > MAX_HEAD_DIM:
            raise EngineError(
                f"attention_backend triton needs a head_dim that {HEAD_DIM_STEP} divides, at most "
                f"{MAX_HEAD_DIM}, this model's is {head_dim}; choose attention_backend torch"
            )
        self._kv = kv
        self._windows = tuple(windows)
        self._scale = scale
        self._deterministic = deterministic

    def build_inputs(self, batch: Chunks) -> ModelInputs:
        return build_inputs(batch, self._kv.block_size, self._kv.device)

    def prepare(self, inputs: ModelInputs) -> PagedMetadata:
        decodes = [span for span in inputs.spans if span.query_len == 1]
        chunks = [span for span in inputs.spans if span.query_len > 1]
        assert inputs.spans[: len(decodes)] == tuple(decodes), "single tokens come first"
        rows = _rows_of(chunks)
        if rows is None:
            return PagedMetadata(inputs.slot_mapping, _rows_of(decodes), None)
        ends = None if self._deterministic else ChunkEnds.of(rows)
        placed = self.place_chunks(rows)
        return PagedMetadata(inputs.slot_mapping, _rows_of(decodes), placed, ends)

    @property
    def decode_padding(self) -> tuple[int, ...]:
        return ()

    def decode_rows(self, entries: Items[ScheduledSequence]) -> list[list[int]]:
        """None: all follows from position and table."""
        return []

    def begin_decodes(self, batch: ScheduledBatch) -> None:
        """Nothing: no block moves."""

    def prepare_decodes(self, slots: SequenceSlots, rows: torch.Tensor) -> PagedMetadata:
        """As `engine.execution.decode_graphs.DecodeBackend`."""
        positions, block_tables = rows[1], slots.block_tables.index_select(0, rows[2])
        blocks = block_tables.gather(1, (positions.clamp_min(0) // BLOCK_SIZE)[:, None])[:, 0]
        places = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        slot_mapping = torch.where(positions < 0, -1, places)
        decodes = PagedRows(slice(0, len(positions)), block_tables, positions + 1)
        return PagedMetadata(slot_mapping, decodes, None)

    def place_chunks(self, chunks: PagedRows) -> PagedRows:
        """As `attend_chunks` takes them."""
        return chunks

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        metadata: PagedMetadata,
    ) -> torch.Tensor:
        query = self.append(layer, query, key, value, cos, sin, self.token_rows(metadata))
        attended = []
        if metadata.decodes is not None:
            attended.append(self.attend_decodes(layer, query, metadata.decodes))
        if metadata.chunks is not None:
            attended.append(self._attend_prompts(layer, query, metadata.chunks, metadata.ends))
        return attended[0] if len(attended) == 1 else torch.cat(attended)

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
        caches, (slot_mapping,) = (self._kv.keys[layer], self._kv.values[layer]), rows
        return rope_append(query, key, value, cos, sin, *caches, slot_mapping, out)

    @property
    def row_padding(self) -> tuple[int, ...]:
        return (-1,)

    def token_rows(self, metadata: PagedMetadata) -> tuple[torch.Tensor, ...]:
        """Slots."""
        return (metadata.slot_mapping,)

    def decode_tables(self, shape: TablesShape) -> PagedTables:
        """As `engine.execution.decode_attention_graphs.SingleAttention`; `shape` is that of the
        block tables."""
        return PagedTables(shape, self._kv.device)

    def decodes_of(self, metadata: PagedMetadata) -> PagedRows | None:
        return metadata.decodes

    @property
    def prompt_attention(self) -> Self:
        return self

    def chunks_of(self, metadata: PagedMetadata) -> PagedRows | None:
        """As `engine.execution.prompt_attention_graphs.PromptAttention`."""
        return metadata.chunks

    def begin_layer(self, layer: int, metadata: PagedMetadata) -> None:
        """Nothing: no block moves."""

    def attend_prompts(
        self, layer: int, query: torch.Tensor, metadata: PagedMetadata
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """As `engine.execution.layer_graphs.LayerBackend`."""
        chunks, ends = metadata.chunks, metadata.ends
        if chunks is not None:
            yield chunks.rows, self._attend_prompts(layer, query, chunks, ends)

    def _attend_prompts(
        self, layer: int, query: torch.Tensor, chunks: PagedRows, ends: ChunkEnds | None
    ) -> torch.Tensor:
        if ends is None or layer < len(self._windows) - 1:
            return self.attend_chunks(layer, query, chunks)
        queries = query[chunks.rows]
        attended = torch.zeros_like(queries)
        attended[ends.rows] = self._attend_tokens(layer, queries[ends.rows], ends)
        return attended

    def attend_decodes(self, layer: int, query: torch.Tensor, decodes: PagedRows) -> torch.Tensor:
        """Of tokens that the cache holds by now; `query` is turned, of the whole step."""
        return self._attend_tokens(layer, query[decodes.rows], decodes)

    def _attend_tokens(
        self, layer: int, query: torch.Tensor, tokens: PagedRows | ChunkEnds
    ) -> torch.Tensor:
        return paged_decode(
            query,
            self._kv.keys[layer],
            self._kv.values[layer],
            tokens.block_tables,
            tokens.context_lens,
            self._scale,
            self._windows[layer],
            deterministic=self._deterministic,
        )

    def attend_chunks(self, layer: int, query: torch.Tensor, chunks: PagedRows) -> torch.Tensor:
        """As `attend_decodes`, of chunks that are placed."""
        return self._attend_chunks(layer, query, chunks, deterministic=self._deterministic)

    def attend_recorded(self, layer: int, query: torch.Tensor, chunks: PagedRows) -> torch.Tensor:
        """As `engine.execution.prompt_attention_graphs.PromptAttention`: in one launch, whatever
        comes in it later."""
        return self._attend_chunks(layer, query, chunks, deterministic=True)

    def _attend_chunks(
        self, layer: int, query: torch.Tensor, chunks: PagedRows, *, deterministic: bool
    ) -> torch.Tensor:
        assert chunks.query_starts is not None
        return paged_prefill(
            query[chunks.rows],
            chunks.query_starts,
            self._kv.keys[layer],
            self._kv.values[layer],
            chunks.block_tables,
            chunks.context_lens,
            self._scale,
            self._windows[layer],
            max(chunks.query_lens),
            deterministic=deterministic,
        )


def _rows_of(spans: Items[QuerySpan]) -> PagedRows | None:
    """The spans as one; shorter tables are padded with block 0, which is never read."""
    if not spans:
        return None
    width = max(span.block_tables.shape[1] for span in spans)
    tables = [F.pad(each.block_tables, (0, width - each.block_tables.shape[1])) for each in spans]
    lens = [span.query_len for span in spans for _ in range(span.num_sequences)]
    starts = [0, *itertools.accumulate(lens)]
    return PagedRows(
        slice(spans[0].rows.start, spans[-1].rows.stop),
        torch.cat(tables),
        torch.cat([span.context_lens for span in spans]),
        upload(starts, tables[0].device, torch.int32),
        tuple(lens),
    )
