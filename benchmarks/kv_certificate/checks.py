"""Certificates of the kernel against float64 on the cache as it is stored."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.kv_certificate.stored import Stored
from kernels.kv_quantise.layout import BLOCK_TOKENS
from kernels.tiered_decode.api import num_runs_of
from kernels.tiered_decode.reference import dequantised
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_skip.api import tiered_skip

# What the kernel's own arithmetic may add to an error, over the longest value: the bar of
# tiered_decode's worst relative error.
ARITHMETIC = 2e-3
MIN_SKIPPED = 0.3
LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class Exact:
    """Of one sequence, float64: keys and values [num_kv_heads, length, size], and the length of the
    longest value of each cold block and of all, [num_kv_heads, blocks] and [num_kv_heads, 1]."""

    keys: torch.Tensor
    values: torch.Tensor
    longest: torch.Tensor
    longest_of_all: torch.Tensor

    @classmethod
    def of(cls, stored: Stored, sequence: int = 0) -> "Exact":
        bounds = list(stored.bounds)
        keys, values = (
            dequantised(stored.slabs, table[sequence], bounds, stored.formats, is_keys=is_keys)
            for table, is_keys in ((stored.key_tables, True), (stored.value_tables, False))
        )
        lengths = values.norm(dim=-1)
        cold = lengths[:, bounds[0] : bounds[1]].unflatten(1, (-1, BLOCK_TOKENS))
        return cls(keys, values, cold.amax(2), lengths.amax(1, keepdim=True))


@dataclass
class Tally:
    """checks: of a query with at least MIN_SKIPPED of its cold blocks skipped, its certificate.
    masses: of blocks. Violations: a share of the softmax beyond it, an error beyond it, a block
    beyond its mass."""

    checks: int = 0
    masses: int = 0
    shares_violated: int = 0
    errors_violated: int = 0
    masses_violated: int = 0
    launched: int = 0
    tightest: float = 0.0  # greatest share over what is certified

    @property
    def violations(self) -> int:
        return self.shares_violated + self.errors_violated + self.masses_violated

    def add(self, other: "Tally") -> None:
        self.checks += other.checks
        self.masses += other.masses
        self.shares_violated += other.shares_violated
        self.errors_violated += other.errors_violated
        self.masses_violated += other.masses_violated
        self.launched += other.launched
        self.tightest = max(self.tightest, other.tightest)


@dataclass(frozen=True)
class Launch:
    """Many queries of one stored sequence, each as a sequence of its own: query [num_queries,
    num_heads, size] bfloat16, skips [num_queries, num_kv_heads, blocks]."""

    stored: Stored
    exact: Exact
    query: torch.Tensor
    skips: torch.Tensor
    epsilon: float
    scale: float
    sequence: int = 0

    def certified(self) -> tuple[torch.Tensor, ...]:
        """out, lse, skipped, masses and left_out."""
        stored, num = self.stored, len(self.query)
        num_kv_heads, group = self.skips.shape[1], self.query.shape[1] // self.skips.shape[1]
        device = self.query.device
        rows = (
            each[self.sequence].expand(num, -1).contiguous()
            for each in (stored.key_tables, stored.value_tables, stored.reach)
        )
        key_tables, value_tables, reach = rows
        bounds = torch.tensor(stored.bounds, dtype=torch.int32, device=device).repeat(num, 1)
        size = self.query.shape[2]
        num_runs = num_runs_of(device, self.query.shape[1], num_kv_heads, size=size)
        plan = tiered_plan(bounds, num_runs, stored.formats)
        masses = self.query.new_empty(*self.skips.shape, group, dtype=torch.float32)
        left_out = self.skips.clone()
        tables = key_tables, value_tables, plan, stored.formats, self.scale
        results = tiered_skip(
            self.query,
            stored.slabs,
            *tables,
            self.skips,
            masses,
            left_out,
            reach,
            self.epsilon,
            torch.float32,
        )
        return *results, masses, left_out

    def tally(self) -> Tally:
        out, lse, skipped, masses, left_out = (each.double() for each in self.certified())
        num, num_heads, size = self.query.shape
        num_kv_heads, num_cold = self.skips.shape[1], self.stored.num_cold
        group, sink = num_heads // num_kv_heads, self.stored.bounds[0]
        queries = self.query.double().view(num, num_kv_heads, group, size).transpose(0, 1)
        scores = self.scale * torch.bmm(queries.flatten(1, 2), self.exact.keys.transpose(1, 2))
        scores = scores.view(num_kv_heads, num, group, -1)
        whole = scores.logsumexp(-1)
        cold = scores[..., sink : sink + BLOCK_TOKENS * num_cold]
        blocks = cold.unflatten(-1, (num_cold, BLOCK_TOKENS)).logsumexp(-1)
        is_skipped = left_out[..., :num_cold].bool().transpose(0, 1)[:, :, None]
        is_skipped = is_skipped.expand_as(blocks)
        share = (blocks.masked_fill(~is_skipped, float("-inf")).logsumexp(-1) - whole).exp()
        certified = torch.sigmoid(skipped - lse).nan_to_num()
        certified = certified.view(num, num_kv_heads, group).transpose(0, 1)

        scores.sub_(whole[..., None]).exp_()
        exact = torch.bmm(scores.flatten(1, 2), self.exact.values).view_as(queries)
        came = out.view(num, num_kv_heads, group, size).transpose(0, 1)
        longest = self.exact.longest[:, None, None].expand_as(is_skipped)
        longest = longest.masked_fill(~is_skipped, 0.0).amax(-1)
        bound = certified * (longest + came.norm(dim=-1))
        bound = bound + ARITHMETIC * self.exact.longest_of_all[:, :, None]
        error = (came - exact).norm(dim=-1)
        raised = LN_2 * masses[:, :, :num_cold].permute(1, 0, 3, 2)
        counts = is_skipped.double().mean(-1) >= MIN_SKIPPED
        tightest = (share / certified)[counts].amax() if counts.any() else torch.zeros(())
        return Tally(
            checks=int(counts.sum()),
            masses=blocks.numel(),
            shares_violated=int((share > certified).sum()),
            errors_violated=int((~(error <= bound)).sum()),
            masses_violated=int((~(blocks <= raised)).sum()),
            launched=counts.numel(),
            tightest=float(tightest),
        )


def tally_of(launches: Iterator[Launch], wanted: int) -> Tally:
    """Until `wanted` checks are made, or no launch is left."""
    whole = Tally()
    for launch in launches:
        whole.add(launch.tally())
        if whole.checks >= wanted:
            break
    return whole
