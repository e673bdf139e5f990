"""The step that only decodes, as one CUDA graph for each padded number of sequences.

All it depends on is in tensors that stay where they are: a replay reads what was last written.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from engine.execution.recorder import Recorder, Results
from engine.execution.sampling_rows import GREEDY_ROW, RowParams, SamplingRows, row_of
from engine.execution.sequence_slots import Slots
from engine.execution.uploads import upload
from engine.models.decoder import Decoder
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.sequence import PENDING

PADDING = -1  # the position of a row that is nobody's


class DecodeBackend(Protocol):
    """Attention that can be recorded: by kernels, from tables that the slots have."""

    @property
    def decode_padding(self) -> tuple[int, ...]:
        """A column of the backend's own rows, of a token that is nobody's."""

    def decode_rows(self, entries: Items[ScheduledSequence]) -> list[list[int]]:
        """Its own rows of these, a number for each: what changes from token to token."""

    def begin_decodes(self, batch: ScheduledBatch) -> None:
        """What is to be done before a recorded step."""

    def prepare_decodes(self, slots: Any, rows: torch.Tensor) -> Any:
        """The metadata, of `RecordedStep.rows`. `slots` are of the kind that belongs to it."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """As `AttentionBackend`."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """rows [3 and more, size] int64: token ids (PENDING: the last of the slot), positions (PADDING
    of a row that is nobody's), slots, and the backend's own. A replay leaves logits [size,
    vocab_size] float32 and chosen [size] int64 in their places, and `chosen` in the slots as the
    last tokens. sampled_as: what `sampling` holds."""

    rows: torch.Tensor
    sampling: SamplingRows
    sampled_as: list[RowParams]
    logits: torch.Tensor
    chosen: torch.Tensor
    replay: Callable[[], None]


@dataclass(frozen=True, slots=True)
class DecodedRows:
    """logits [num_sequences, vocab_size] and chosen [num_sequences] of slots [num_sequences], which
    keep `chosen`. The next run overwrites them."""

    logits: torch.Tensor
    chosen: torch.Tensor
    slots: torch.Tensor


class DecodeGraphs:
    """Of one rank, with attention by the kernels."""

    def __init__(
        self,
        decoder: Decoder,
        backend: DecodeBackend,
        slots: Slots,
        recorder: Recorder,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._slots = slots
        self._recorder = recorder
        self._steps: dict[int, RecordedStep] = {}

    @torch.inference_mode()
    def record(self, size: int) -> None:
        padding = upload(self._padding, self._slots.device)
        rows = padding[:, None].repeat(1, size)
        sampled_as = [GREEDY_ROW] * size
        sampling = SamplingRows.of(sampled_as, self._slots.device)
        (logits, chosen), replay = self._recorder.record(partial(self._compute, rows, sampling))
        self._steps[size] = RecordedStep(rows, sampling, sampled_as, logits, chosen, replay)

    def fits(self, batch: ScheduledBatch) -> bool:
        """Every sequence computes one token and samples one, and there is room for all."""
        entries = batch.scheduled
        is_decode = all(
            entry.num_new_tokens == 1
            and entry.samples
            and all(span.is_decode for span in entry.spans)
            for entry in entries
        )
        return is_decode and 0 < len(entries) <= max(self._steps, default=0)

    def run(self, batch: ScheduledBatch, slots: list[int]) -> DecodedRows:
        """Of a batch that `fits`; `slots` are its sequences'."""
        entries = batch.scheduled
        num_rows = len(entries)
        size = min(size for size in self._steps if size >= num_rows)
        step, num_padding = self._steps[size], size - num_rows
        token_ids = [entry.new_token_ids[0] for entry in entries]
        starts = [entry.start for entry in entries]
        rows = [token_ids, starts, slots, *self._backend.decode_rows(entries)]
        padded = [
            row + [padding] * num_padding for row, padding in zip(rows, self._padding, strict=True)
        ]
        step.rows.copy_(upload(padded, self._slots.device))
        self._sample_as(step, [row_of(entry.sequence.params) for entry in entries])
        self._backend.begin_decodes(batch)
        step.replay()
        return DecodedRows(step.logits[:num_rows], step.chosen[:num_rows], step.rows[2, :num_rows])

    @property
    def _padding(self) -> tuple[int, ...]:
        return (0, PADDING, self._slots.spare, *self._backend.decode_padding)

    def _sample_as(self, step: RecordedStep, params: list[RowParams]) -> None:
        padded = params + [GREEDY_ROW] * (len(step.sampled_as) - len(params))
        if padded != step.sampled_as:
            step.sampling.copy_(SamplingRows.of(padded, self._slots.device))
            step.sampled_as[:] = padded

    def _compute(self, rows: torch.Tensor, sampling: SamplingRows) -> Results:
        token_ids, positions, slots = rows[:3].unbind()
        last_tokens = self._slots.last_tokens.index_select(0, slots)
        input_ids = torch.where(token_ids == PENDING, last_tokens, token_ids)
        metadata = self._backend.prepare_decodes(self._slots, rows)
        attend = partial(self._backend.attend, metadata=metadata)
        normed = self._decoder.forward(input_ids, positions.clamp_min(0), attend)
        logits = self._decoder.logits(normed)
        chosen = sampling.sample(logits, positions + 1)
        self._slots.keep(slots, chosen)
        return logits, chosen


def padded_sizes(max_num_sequences: int) -> list[int]:
    """Largest first. 1, 2, 4, then by eights up to 64 and by sixteens beyond: attention of a padded
    row costs nothing, the matrices little."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_sequences, 16)]
    fitting = [size for size in sizes if size < max_num_sequences]
    return [max_num_sequences, *reversed(fitting)]
