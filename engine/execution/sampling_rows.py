"""How the rows of a step are sampled, as tensors for the kernel."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from engine.execution.uploads import upload
from engine.sampling_params import SamplingParams
from kernels.sampling.api import sample
from kernels.sampling.uniform import int64_of

RowParams = tuple[float, float, float, int, int]
GREEDY_ROW: RowParams = (0.0, 0.0, 1.0, 0, 0)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """floats [num_rows, 3] float32: temperature, min-p, top-p; numbers [num_rows, 2] int64: top-k
    (0 off), seed."""

    floats: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, rows: Items[RowParams], device: torch.device) -> SamplingRows:
        seeds = int64_of(row[4] for row in rows).tolist()
        floats = upload([row[:3] for row in rows], device, torch.float32)
        numbers = [(row[3], seed) for row, seed in zip(rows, seeds, strict=True)]
        return cls(floats, upload(numbers, device))

    def copy_(self, other: SamplingRows) -> None:
        self.floats.copy_(other.floats)
        self.numbers.copy_(other.numbers)

    def sample(
        self, logits: torch.Tensor, positions: torch.Tensor, masks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """logits [num_rows, vocab_size] float32, positions [num_rows] int64 of the tokens that are
        sampled, masks as `grammar_masks` has them -> [num_rows] int64."""
        return sample(logits, self.floats, self.numbers, positions, masks)


def row_of(params: SamplingParams) -> RowParams:
    if params.is_greedy:
        return GREEDY_ROW
    return params.temperature, params.min_p, params.top_p, params.top_k or 0, params.seed
