"""Sampled tokens on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from engine.execution.uploads import Arrival, download
from engine.outputs import SampledTokens, TokenLogprobs


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """token_ids [num_sequences] int64, on the device, which may not have computed them yet."""

    token_ids: torch.Tensor
    _downloaded: torch.Tensor
    _logprobs: tuple[DrawnLogprobs | None, ...]
    _arrival: Arrival

    @classmethod
    def of(cls, token_ids: torch.Tensor, logprobs: Items[DrawnLogprobs | None]) -> DrawnTokens:
        downloaded = download(token_ids)
        return cls(token_ids, downloaded, tuple(logprobs), Arrival(token_ids.device))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def wait(self) -> SampledTokens:
        self._arrival.wait()
        token_ids = tuple(self._downloaded.tolist())
        logprobs = tuple(None if each is None else each.read() for each in self._logprobs)
        return SampledTokens(token_ids, logprobs)


@dataclass(frozen=True, slots=True)
class DrawnLogprobs:
    """Of the raw distribution: the row is as the model gave it."""

    chosen: torch.Tensor
    values: torch.Tensor
    indices: torch.Tensor

    def read(self) -> TokenLogprobs:
        top = tuple(zip(self.indices.tolist(), self.values.tolist(), strict=True))
        return TokenLogprobs(float(self.chosen), top)


def draw_logprobs(row: torch.Tensor, token_id: torch.Tensor, num_top: int) -> DrawnLogprobs:
    """row [vocab_size], token_id [] -> of that token, and the `num_top` most likely ones."""
    logprobs = row.log_softmax(-1)
    values, indices = logprobs.topk(min(num_top, row.shape[0]))
    chosen = logprobs.gather(0, token_id[None])
    return DrawnLogprobs(download(chosen), download(values), download(indices))
