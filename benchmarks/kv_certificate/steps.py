"""Decode steps over captured attention, each of which skips what the one before found light. Layers
stand side by side, as the sequences of one batch."""

from dataclasses import dataclass

import torch

from benchmarks.kernels.timing import graph_us
from benchmarks.kv_certificate.captured import Captured
from benchmarks.kv_certificate.stored import Stored, store, tiers_of
from kernels.skip_list.api import skip_list
from kernels.tiered_decode.api import num_runs_of, tiered_decode
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import Formats
from kernels.tiered_skip.api import tiered_skip

# Of epsilon: what the next step is to skip by this one's masses, for they move. Least was read on
# prose of 0.3 to 2.5.
BUDGET = 0.6
SETTLED = 16  # steps before which a share is not counted


@dataclass(frozen=True)
class Found:
    """Means over steps, layers and KV heads. read: of cold blocks, the values; again: of them, keys
    and values in a second launch; heads: that need one. skips: the last, [layers, num_kv_heads,
    blocks]."""

    read: float
    again: float
    heads: float
    skips: torch.Tensor


class Steps:
    """times: how often the captured tokens follow each other."""

    def __init__(
        self, captured: Captured, formats: Formats, epsilon: float, times: int = 1
    ) -> None:
        self.queries = captured.queries.transpose(0, 1).contiguous()
        keys, values = (each.repeat(1, 1, times, 1) for each in (captured.keys, captured.values))
        self.epsilon = epsilon
        self.first_length = keys.shape[2] - len(self.queries) + 1
        bounds = (*tiers_of(self.first_length)[:3], keys.shape[2])
        self.stored: Stored = store(keys, values, bounds, formats)
        num_layers, num_kv_heads, _, size = keys.shape
        self.scale, num_heads = size**-0.5, self.queries.shape[2]
        self._num_runs = num_runs_of(keys.device, num_heads, num_kv_heads, size=size)
        shape = num_layers, num_kv_heads, self.stored.num_cold
        self.skips = torch.zeros(shape, dtype=torch.int32, device=keys.device)
        self.masses = torch.empty(*shape, num_heads // num_kv_heads, device=keys.device)
        self.left_out = torch.empty_like(self.skips)

    def bounds(self, length: int) -> torch.Tensor:
        each = torch.tensor([*self.stored.bounds[:3], length], dtype=torch.int32)
        return each.repeat(len(self.skips), 1).to(self.skips.device)

    def tables(self, bounds: torch.Tensor) -> tuple[object, ...]:
        stored = self.stored
        plan = tiered_plan(bounds, self._num_runs, stored.formats)
        tables = stored.key_tables, stored.value_tables
        return stored.slabs, *tables, plan, stored.formats, self.scale

    def take(
        self, nth: int, tables: tuple[object, ...], bounds: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """out, lse and skipped of step `nth`; the next one's skips are chosen."""
        state = self.skips, self.masses, self.left_out, self.stored.reach
        results = tiered_skip(self.queries[nth], *tables, *state, self.epsilon)
        budget = BUDGET * self.epsilon
        self.skips = skip_list(self.masses, results[1], bounds, self.stored.formats, budget)
        return results

    def found(self) -> Found:
        """Of all steps, each a token longer than the one before."""
        counted = []
        for nth in range(len(self.queries)):
            before, bounds = self.skips, self.bounds(self.first_length + nth)
            self.left_out.copy_(before)
            self.take(nth, self.tables(bounds), bounds)
            is_again = (before != self.left_out).float()
            read = 1 - self.left_out.float()
            each = read.mean(), is_again.mean(), is_again.amax(-1).mean()
            counted.append(torch.stack(each))
        return Found(*torch.stack(counted[SETTLED:]).mean(0).tolist(), self.skips)

    def times_us(self) -> tuple[float, float]:
        """Of a step that skips, choice of the next one's included, and of tiered_decode."""
        bounds = self.bounds(self.stored.bounds[3])
        tables, num = self.tables(bounds), len(self.queries)
        kept = [self.skips]

        def step(index: int) -> object:
            results = self.take(index % num, tables, bounds)
            kept.append(self.skips)
            return results

        skipping_us = graph_us(step)
        decode_us = graph_us(lambda index: tiered_decode(self.queries[index % num], *tables))
        return skipping_us, decode_us
