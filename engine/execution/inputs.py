"""ScheduledBatch -> the tensors of one step. Rows are regrouped so that every span is a slice."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby

import torch

from engine.scheduling.batch import ScheduledBatch, ScheduledSequence


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
class ModelInputs:
    """`sampled_rows` follows `batch.sampling`, whatever the order of the rows."""

    input_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64
    spans: tuple[QuerySpan, ...]
    sampled_rows: torch.Tensor  # [num_sampled] int64


def build_inputs(batch: ScheduledBatch, block_size: int, device: torch.device) -> ModelInputs:
    groups = _group(batch.scheduled, block_size)
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[QuerySpan] = []
    last_rows: dict[str, int] = {}
    for group in groups:
        spans.append(_build_span(group, len(input_ids), block_size, device))
        for entry in group:
            input_ids += entry.sequence.token_ids[entry.start : entry.end]
            positions += range(entry.start, entry.end)
            slots += _slots(entry, block_size)
            last_rows[entry.sequence.seq_id] = len(input_ids) - 1
    sampled_rows = [last_rows[entry.sequence.seq_id] for entry in batch.sampling]

    def to_tensor(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    return ModelInputs(
        to_tensor(input_ids),
        to_tensor(positions),
        to_tensor(slots),
        tuple(spans),
        to_tensor(sampled_rows),
    )


def _group(scheduled: Items[ScheduledSequence], block_size: int) -> list[list[ScheduledSequence]]:
    """Single tokens by the power of two of their blocks, so that padding at most doubles the
    blocks read; every longer chunk alone."""

    def size_class(entry: ScheduledSequence) -> int:
        return _num_blocks(entry, block_size).bit_length()

    singles = sorted((entry for entry in scheduled if entry.num_new_tokens == 1), key=size_class)
    groups = [list(group) for _, group in groupby(singles, key=size_class)]
    return groups + [[entry] for entry in scheduled if entry.num_new_tokens > 1]


def _num_blocks(entry: ScheduledSequence, block_size: int) -> int:
    return -(-entry.end // block_size)


def _slots(entry: ScheduledSequence, block_size: int) -> list[int]:
    table = entry.sequence.block_table
    return [
        table[position // block_size] * block_size + position % block_size
        for position in range(entry.start, entry.end)
    ]


def _build_span(
    group: Items[ScheduledSequence], start: int, block_size: int, device: torch.device
) -> QuerySpan:
    max_num_blocks = max(_num_blocks(entry, block_size) for entry in group)
    tables = []
    for entry in group:
        used = entry.sequence.block_table[: _num_blocks(entry, block_size)]
        tables.append(used + [0] * (max_num_blocks - len(used)))
    return QuerySpan(
        start=start,
        query_len=group[0].num_new_tokens,
        block_tables=torch.tensor(tables, dtype=torch.int64, device=device),
        context_lens=torch.tensor([entry.end for entry in group], dtype=torch.int64, device=device),
    )
