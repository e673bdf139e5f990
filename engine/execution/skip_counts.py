"""What certified skipping has left out so far: summed up on the device, read by the host late."""

from __future__ import annotations

from dataclasses import astuple

import torch

from engine.execution.tiered_skips import StepSkips
from engine.execution.uploads import Arrival, download
from engine.outputs import SkipCounts


class SkipCounter:
    def __init__(self, device: torch.device) -> None:
        self.latest = SkipCounts()
        self._sums = torch.zeros(len(astuple(self.latest)), dtype=torch.float64, device=device)
        self._on_the_way: tuple[torch.Tensor, Arrival] | None = None

    def add(self, step: StepSkips, num_cold: torch.Tensor) -> None:
        """num_cold [num_rows]: blocks that each row could skip. Of a step that is through, before
        the next one's list is chosen."""
        num_layers, _, num_kv_heads, _ = step.skips.shape
        num_queries = step.lse.shape[2]
        cold = num_cold.sum() * (num_layers * num_kv_heads)
        is_cold = (num_cold > 0).sum() * num_layers
        is_again = (step.left_out != step.skips).any(-1)
        certificates = step.certificates
        found = (
            cold,
            cold - step.left_out.sum(),
            is_cold * num_kv_heads,
            is_again.sum(),
            is_cold * num_queries,
            certificates.sum(),
        )
        self._sums[:-1].add_(torch.stack([each.double() for each in found]))
        greatest = self._sums[-1:]
        torch.maximum(greatest, certificates.amax().double(), out=greatest)

    def read(self) -> None:
        """`latest` becomes what was asked for here before, once it has come; never waits."""
        if self._on_the_way is not None:
            sums, arrival = self._on_the_way
            if not arrival.has_come:
                return
            self.latest = SkipCounts(*sums.tolist())
        sums = download(self._sums)
        self._on_the_way = sums, Arrival(self._sums.device)

    def reset(self) -> None:
        self.latest = SkipCounts()
        self._sums.zero_()
        self._on_the_way = None
