"""Certificates of the kernel against float64 on the cache as it is stored."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.kv_certificate.stored import Stored
from kernels.kv_quantise.layout import BLOCK_TOKENS
from kernels.tiered_decode.api import num_runs_of
from kernels.tiered_decode.reference import dequantised
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_skip.api import tiered_skip
from kernels.tiered_skip.rounding import SUM_ERROR

# What rounded weights and values may add to an error, over the longest value.
ARITHMETIC = 2e-3
FLOAT64 = 1e-9  # what this module's own arithmetic may, of scores of thousands
LEAST = torch.finfo(torch.float64).tiny  # a share below it has few digits, and a sigmoid none
MIN_SKIPPED = 0.3
MAX_EXAMPLES = 8
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
    masses: of blocks. Violations, of all queries: a share of the softmax beyond it, an error beyond
    it or beyond the kernel's arithmetic, a block beyond its mass; `examples` of them."""

    checks: int = 0
    masses: int = 0
    shares_violated: int = 0
    errors_violated: int = 0
    masses_violated: int = 0
    launched: int = 0
    tightest: float = 0.0  # greatest share over what is certified
    examples: list[dict[str, object]] = field(default_factory=list)

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
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]


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
    words: str = ""  # what is hostile about it

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
        num_cold, sink = self.stored.num_cold, self.stored.bounds[0]
        queries = self._by_heads(self.query.double())
        scores = self.scale * torch.einsum("kqgd,ktd->kqgt", queries, self.exact.keys)
        whole = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(whole).exp_()
        weights /= weights.sum(-1, keepdim=True)
        cold = weights[..., sink : sink + BLOCK_TOKENS * num_cold]
        cold = cold.unflatten(-1, (num_cold, BLOCK_TOKENS))
        blocks = cold.sum(-1)
        is_skipped = left_out[..., :num_cold].bool().transpose(0, 1)[:, :, None]
        is_skipped = is_skipped.expand_as(blocks)
        share = (blocks * is_skipped).sum(-1)
        certified = self._by_heads(torch.sigmoid(skipped - lse).nan_to_num())

        exact = torch.einsum("kqgt,ktd->kqgd", weights, self.exact.values)
        cold.masked_fill_(is_skipped[..., None], 0.0)
        attended = torch.einsum("kqgt,ktd->kqgd", weights, self.exact.values)
        attended /= weights.sum(-1, keepdim=True)
        longest = self.exact.longest[:, None, None] * is_skipped
        certain = certified * (longest.amax(-1) + attended.norm(dim=-1))
        left_out_error = (attended - exact).norm(dim=-1)
        came = self._by_heads(out)
        error, arithmetic = (came - attended).norm(dim=-1), self._arithmetic(queries, came)
        is_off = (left_out_error > certain + FLOAT64) | ~(error <= arithmetic)
        raised = LN_2 * masses[:, :, :num_cold].permute(1, 0, 3, 2)
        is_heavier = ~(blocks.log() + whole <= raised)
        counts = is_skipped.double().mean(-1) >= MIN_SKIPPED
        is_beyond = share > certified * (1 + FLOAT64) + LEAST
        figures = {
            "share": share,
            "certified": certified,
            "error of what is left out": left_out_error,
            "certain": certain,
            "error": error,
            "arithmetic": arithmetic,
            "lse": self._by_heads(lse),
            "lse of all": whole[..., 0],
        }
        return Tally(
            checks=int(counts.sum()),
            masses=blocks.numel(),
            shares_violated=int(is_beyond.sum()),
            errors_violated=int(is_off.sum()),
            masses_violated=int(is_heavier.sum()),
            launched=counts.numel(),
            tightest=float((share / certified).nan_to_num().masked_fill(~counts, 0.0).amax()),
            examples=self._examples({"share": is_beyond, "error": is_off}, figures),
        )

    def _examples(
        self, violated: Mapping[str, torch.Tensor], figures: Mapping[str, torch.Tensor]
    ) -> list[dict[str, object]]:
        """One of each kind."""
        return [
            {"violated": kind, "of": self.words, "epsilon": self.epsilon}
            | {name: str(float(each[tuple(where[0])])) for name, each in figures.items()}
            for kind, is_violated in violated.items()
            if len(where := is_violated.nonzero())
        ]

    def _by_heads(self, each: torch.Tensor) -> torch.Tensor:
        """[num_queries, num_heads, ...] -> [num_kv_heads, num_queries, group, ...]."""
        return each.unflatten(1, (self.skips.shape[1], -1)).transpose(0, 1)

    def _arithmetic(self, queries: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        """By how much the kernel's result may be off from exact attention to the same blocks, for
        its scores are, by what `rounding` proves, and its weights and values."""
        reach = self.stored.reach[self.sequence].double()[:, None, None]
        off = torch.exp(queries.norm(dim=-1) * self.scale * reach + SUM_ERROR)
        longest = self.exact.longest_of_all[:, :, None]
        return off * (off - 1) * (longest + came.norm(dim=-1)) + ARITHMETIC * longest


def tallies_of(launches: Iterator[Launch], wanted: int) -> dict[float, Tally]:
    """By epsilon, until `wanted` checks are made or no launch is left."""
    found: dict[float, Tally] = {}
    checks = 0
    for launch in launches:
        tally = launch.tally()
        found.setdefault(launch.epsilon, Tally()).add(tally)
        checks += tally.checks
        if checks >= wanted:
            break
    return found
