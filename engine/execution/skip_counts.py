"""What certified skipping has left out so far: summed up on the device, read by the host late."""

from __future__ import annotations

import torch

from engine.execution.tiered_skips import StepSkips
from engine.execution.uploads import Arrival, download
from engine.outputs import SkipCounts


class SkipCounter:
    """`latest` is of the host."""

    def __init__(self, group: int, device: torch.device) -> None:
        """group: query heads of a KV head."""
        self.latest = SkipCounts()
        self._group = group
        # Cold blocks, those left out, heads, those that read again; certificates, the greatest.
        self._counts = torch.zeros(4, dtype=torch.int64, device=device)
        self._certificates = torch.zeros(2, dtype=torch.float64, device=device)
        self._on_the_way: tuple[torch.Tensor, torch.Tensor, Arrival] | None = None

    def add(self, step: StepSkips, num_cold: torch.Tensor) -> None:
        """num_cold [num_rows]: blocks that each row could skip. Of a step that is through, before
        the next one's list is chosen."""
        num_layers, _, num_kv_heads, _ = step.skips.shape
        of_all = num_layers * num_kv_heads
        is_again = (step.left_out != step.skips).any(-1)
        heads = (num_cold > 0).sum()
        found = num_cold.sum() * of_all, step.left_out.sum(), heads * of_all, is_again.sum()
        self._counts.add_(torch.stack(found))
        total, greatest = self._certificates.split(1)
        certificates = step.certificates
        total.add_(certificates.sum(dtype=torch.float64))
        torch.maximum(greatest, certificates.amax(), out=greatest)

    def read(self) -> None:
        """`latest` becomes what was asked for here before, once it has come; never waits."""
        if self._on_the_way is not None:
            counts, certificates, arrival = self._on_the_way
            if not arrival.has_come:
                return
            cold, left_out, heads, again = counts.tolist()
            queries = heads * self._group
            self.latest = SkipCounts(
                cold, cold - left_out, heads, again, queries, *certificates.tolist()
            )
        counts, certificates = download(self._counts), download(self._certificates)
        self._on_the_way = counts, certificates, Arrival(self._counts.device)

    def reset(self) -> None:
        self.latest = SkipCounts()
        self._counts.zero_()
        self._certificates.zero_()
        self._on_the_way = None
