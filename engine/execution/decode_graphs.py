"""The step that only decodes, as one CUDA graph for each padded number of sequences.

All it depends on is in tensors that stay where they are: a replay reads what was last written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine.execution.recorder import Recorder, Results
from engine.execution.sampling_rows import GREEDY_ROW, RowParams, SamplingRows, row_of
from engine.execution.sequence_slots import SequenceSlots
from engine.execution.triton_attention import TritonAttention
from engine.execution.uploads import upload
from engine.models.decoder import Decoder
from engine.scheduling.batch import ScheduledBatch
from engine.sequence import PENDING

PADDING = -1  # the position of a row that is nobody's


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """rows [3, size] int64: token ids (PENDING: the last of the slot), positions, slots. A replay
    leaves logits [size, vocab_size] float32 and chosen [size] int64 in their places, and `chosen`
    in the slots as the last tokens. sampled_as: what `sampling` holds."""

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
        backend: TritonAttention,
        slots: SequenceSlots,
        recorder: Recorder,
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._slots = slots
        self._recorder = recorder
        self._steps: dict[int, RecordedStep] = {}

    @torch.inference_mode()
    def record(self, size: int) -> None:
        padding_row = upload([0, PADDING, self._slots.spare], self._slots.device)
        rows = padding_row[:, None].repeat(1, size)
        sampled_as = [GREEDY_ROW] * size
        sampling = SamplingRows.of(sampled_as, self._slots.device)
        (logits, chosen), replay = self._recorder.record(partial(self._compute, rows, sampling))
        self._steps[size] = RecordedStep(rows, sampling, sampled_as, logits, chosen, replay)

    def fits(self, batch: ScheduledBatch) -> bool:
        """Every sequence computes one token and samples one, and there is room for all."""
        entries = batch.scheduled
        is_decode = all(entry.num_new_tokens == 1 and entry.samples for entry in entries)
        return is_decode and 0 < len(entries) <= max(self._steps, default=0)

    def run(self, batch: ScheduledBatch, slots: list[int]) -> DecodedRows:
        """Of a batch that `fits`; `slots` are its sequences'."""
        entries = batch.scheduled
        num_rows = len(entries)
        size = min(size for size in self._steps if size >= num_rows)
        step, num_padding = self._steps[size], size - num_rows
        rows = (
            [entry.new_token_ids[0] for entry in entries] + [0] * num_padding,
            [entry.start for entry in entries] + [PADDING] * num_padding,
            slots + [self._slots.spare] * num_padding,
        )
        step.rows.copy_(upload(rows, self._slots.device))
        self._sample_as(step, [row_of(entry.sequence.params) for entry in entries])
        step.replay()
        return DecodedRows(step.logits[:num_rows], step.chosen[:num_rows], step.rows[2, :num_rows])

    def _sample_as(self, step: RecordedStep, params: list[RowParams]) -> None:
        padded = params + [GREEDY_ROW] * (len(step.sampled_as) - len(params))
        if padded != step.sampled_as:
            step.sampling.copy_(SamplingRows.of(padded, self._slots.device))
            step.sampled_as[:] = padded

    def _compute(self, rows: torch.Tensor, sampling: SamplingRows) -> Results:
        token_ids, positions, slots = rows.unbind()
        last_tokens = self._slots.last_tokens.index_select(0, slots)
        input_ids = torch.where(token_ids == PENDING, last_tokens, token_ids)
        tables = self._slots.block_tables.index_select(0, slots)
        metadata = self._backend.prepare_decodes(tables, positions)
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
