"""The chunks of a step -> its tensors. Rows are regrouped so that every span is a slice."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.uploads import upload


class Chunk(Protocol):
    """New tokens of one sequence, at positions [start, end): a ScheduledSequence on rank 0, on the
    other ranks what they were told of it. `block_table` covers them at least."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def num_new_tokens(self) -> int: ...
    @property
    def new_token_ids(self) -> Items[int]: ...
    @property
    def block_table(self) -> list[int]: ...
    @property
    def samples(self) -> bool: ...


class Chunks(Protocol):
    @property
    def scheduled(self) -> Items[Chunk]: ...


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Rows [start, start + num_sequences * query_len) of the step: sequences that attend in one
    call. Either one chunk of one sequence, or one token each of sequences of like context.
    """

    start: int
    query_len: int
    block_tables: torch.Tensor  # [num_sequences, max_num_blocks] int64, padded with block 0
    context_lens: torch.Tensor  # [num_sequences] int64: tokens in the cache after this step

    @property
    def num_sequences(self) -> int:
        return self.block_tables.shape[0]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.num_sequences * self.query_len)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What all but attention needs to know of a step. `sampled_rows` follows the chunks that
    sample, whatever the order of the rows."""

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    sampled_rows: torch.Tensor  # [num_sampled] int64


@dataclass(frozen=True, slots=True)
class ModelInputs(StepInputs):
    """And what attention over block tables does."""

    slot_mapping: torch.Tensor  # [num_tokens] int64
    spans: tuple[QuerySpan, ...]


def build_inputs(batch: Chunks, block_size: int, device: torch.device) -> ModelInputs:
    input_ids: list[int] = []
    positions: list[range] = []
    slots: list[range] = []
    spans: list[QuerySpan] = []
    last_rows: dict[int, int] = {}  # of chunks, by their place in the batch
    for group in _group(batch.scheduled, block_size):
        spans.append(_build_span([chunk for _, chunk in group], len(input_ids), block_size, device))
        for index, chunk in group:
            input_ids += chunk.new_token_ids
            positions.append(range(chunk.start, chunk.end))
            slots += _slot_runs(chunk, block_size)
            last_rows[index] = len(input_ids) - 1
    sampled_rows = [
        last_rows[index] for index, chunk in enumerate(batch.scheduled) if chunk.samples
    ]

    per_token = upload(np.stack((input_ids, chained(positions), chained(slots))), device)
    rows = upload(sampled_rows, device)
    return ModelInputs(per_token[0], per_token[1], rows, per_token[2], tuple(spans))


def _group(scheduled: Items[Chunk], block_size: int) -> list[list[tuple[int, Chunk]]]:
    """The chunks with their places in the batch: single tokens by the power of two of their
    blocks, so that padding at most doubles the blocks read; every longer chunk alone."""

    def size_class(entry: tuple[int, Chunk]) -> int:
        return _num_blocks(entry[1], block_size).bit_length()

    entries = list(enumerate(scheduled))
    singles = sorted((entry for entry in entries if entry[1].num_new_tokens == 1), key=size_class)
    groups = [list(group) for _, group in groupby(singles, key=size_class)]
    return groups + [[entry] for entry in entries if entry[1].num_new_tokens > 1]


def _num_blocks(chunk: Chunk, block_size: int) -> int:
    return -(-chunk.end // block_size)


def _slot_runs(chunk: Chunk, block_size: int) -> Iterator[range]:
    """One in each block."""
    for index in range(chunk.start // block_size, _num_blocks(chunk, block_size)):
        first = index * block_size
        first_slot = chunk.block_table[index] * block_size - first
        start, end = max(first, chunk.start), min(first + block_size, chunk.end)
        yield range(first_slot + start, first_slot + end)


def chained(runs: Items[range]) -> npt.NDArray[np.int64]:
    """One after the other, none of them number by number: a step may have 16,384 tokens."""
    starts = np.array([run.start for run in runs], dtype=np.int64)
    lens = np.array([len(run) for run in runs], dtype=np.int64)
    ends = lens.cumsum()
    shifts: npt.NDArray[np.int64] = np.repeat(starts - (ends - lens), lens)
    return shifts + np.arange(len(shifts), dtype=np.int64)


def _build_span(
    group: Items[Chunk], start: int, block_size: int, device: torch.device
) -> QuerySpan:
    max_num_blocks = max(_num_blocks(chunk, block_size) for chunk in group)
    tables = []
    for chunk in group:
        used = chunk.block_table[: _num_blocks(chunk, block_size)]
        tables.append(used + [0] * (max_num_blocks - len(used)))
    return QuerySpan(
        start=start,
        query_len=group[0].num_new_tokens,
        block_tables=upload(tables, device),
        context_lens=upload([chunk.end for chunk in group], device),
    )
