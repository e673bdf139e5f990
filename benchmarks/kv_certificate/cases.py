"""What is measured, and its bars: on an H200."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.command import Progress
from benchmarks.errors import MeasurementFailed
from benchmarks.kernels.timing import graph_us
from benchmarks.kv_attention.cases import MIN_SET_BYTES, decode_us
from benchmarks.kv_attention.contexts import (
    NUM_HEADS,
    NUM_KV_HEADS,
    SIZE,
    Contexts,
    cold_bounds,
    sets_of,
)
from benchmarks.kv_certificate.captured import Captured, capture
from benchmarks.kv_certificate.checks import Exact, Launch, Tally, tallies_of
from benchmarks.kv_certificate.hostile import EPSILONS, INT4, K8V4, hostile_launches
from benchmarks.kv_certificate.steps import Steps
from benchmarks.results import Row
from kernels.skip_list.api import skip_list
from kernels.tiered_plan.reference import Formats
from kernels.tiered_skip.api import tiered_skip

CHECKS, VIOLATIONS = "certificate_checks", "certificate_violations"
OVERHEAD, SHARE, SPEEDUP = "certificate_overhead", "skip_share_eps3", "skip_speedup_32k"
NAMES = (CHECKS, VIOLATIONS, OVERHEAD, SHARE, SPEEDUP)
OF_MODEL = {SHARE, SPEEDUP}
MIN_CHECKS, MAX_OVERHEAD, EPSILON = 10**7, 1.03, 0.03
NUM_QUERIES, ROUNDS = 512, 40
CAPTURED_TOKENS, NUM_STEPS, TIMES = 8127, 64, 4
NUM_LAYERS = 32  # whose skips one launch chooses
SHAPES = ((8, 32768), (32, 8192))
NO_HEAD_IS_TOO_MUCH = 0.9999
FORMATS = {"int4": INT4, "k8v4": K8V4}
PEER = "tiered_decode"


@dataclass
class Certificate:
    """more: what the rows have no place for."""

    progress: Progress
    model: Path | None
    more: dict[str, object] = field(default_factory=dict)
    _captured: Captured | None = None

    def rows(self, only: Sequence[str] | None) -> Iterator[Row]:
        """Raises MeasurementFailed."""
        wanted = set(NAMES if only is None else only)
        if wanted & OF_MODEL and self.model is None:
            raise MeasurementFailed(f"{', '.join(sorted(OF_MODEL))} need --model")
        if wanted & {CHECKS, VIOLATIONS}:
            yield from self._check_rows()
        if OVERHEAD in wanted:
            yield self._overhead_row()
        if wanted & OF_MODEL:
            yield from self._captured_rows()

    def _check_rows(self) -> Iterator[Row]:
        tallies = {f"hostile, epsilon {epsilon:g}": Tally() for epsilon in EPSILONS}
        launches = hostile_launches(NUM_QUERIES, ROUNDS, "cuda")
        for epsilon, each in tallies_of(launches, MIN_CHECKS).items():
            tallies[f"hostile, epsilon {epsilon:g}"] = each
        if self.model is not None:
            tallies["captured"] = self._captured_tally()
        tally = Tally()
        for name, each in tallies.items():
            self.progress(f"{name}: {each}")
            tally.add(each)
        self.more["checks"] = {name: vars(each) for name, each in tallies.items()}
        metric = "certificates of kernel output held against float64"
        yield Row(CHECKS, metric, "queries", "higher", tally.checks, floor=MIN_CHECKS)
        metric = "shares, errors and masses beyond what is certified"
        yield Row(VIOLATIONS, metric, "queries", "lower", tally.violations, floor=0)

    def _captured_tally(self) -> Tally:
        """Real keys and values; real queries, and others near them."""
        whole = Tally()
        generator = torch.Generator("cuda").manual_seed(2)
        for formats in FORMATS.values():
            steps = Steps(self._capture(), formats, EPSILON)
            steps.found()
            for layer in range(len(steps.skips)):
                exact = Exact.of(steps.stored, layer)
                query = steps.queries[:, layer].repeat(4, 1, 1)
                noise = torch.randn(query.shape, generator=generator, device="cuda")
                query = (query.float() * (1 + 0.2 * noise)).bfloat16()
                skips = steps.skips[layer].expand(len(query), -1, -1).contiguous()
                for epsilon in EPSILONS:
                    launch = Launch(steps.stored, exact, query, skips, epsilon, steps.scale, layer)
                    whole.add(launch.tally())
        return whole

    def _overhead_row(self) -> Row:
        """The greatest of all shapes and formats."""
        found = []
        for batch, context_len in SHAPES:
            for name, formats in FORMATS.items():
                bounds = cold_bounds((context_len,) * batch)
                sets = sets_of(bounds, formats, MIN_SET_BYTES)
                blocks = context_len // 64
                skips = torch.zeros(batch, NUM_KV_HEADS, blocks, dtype=torch.int32, device="cuda")
                ours = _skip_us(sets, skips, EPSILON) + _list_us(batch, blocks, formats)
                found.append((ours, decode_us(sets), f"{batch} x {context_len}, {name}"))
                self.progress(f"{OVERHEAD}: {found[-1]}")
                del sets
                torch.cuda.empty_cache()
        self.more["overheads"] = {name: ours / theirs for ours, theirs, name in found}
        ours, theirs, name = max(found, key=lambda each: each[0] / each[1])
        metric = f"time with nothing skipped, {name}"
        bar = 1 / MAX_OVERHEAD
        return Row(OVERHEAD, metric, "us", "lower", ours, PEER, theirs, bar, "ratio")

    def _captured_rows(self) -> Iterator[Row]:
        """Both formats; the rows are those of the default one."""
        shares, times = {}, {}
        for name, formats in FORMATS.items():
            found = Steps(self._capture(), formats, EPSILON).found()
            shares[name] = {"read": found.read, "again": found.again, "heads": found.heads}
            steps = Steps(self._capture(), formats, EPSILON, TIMES)
            steps.found()
            times[name] = steps.times_us()
            del steps
            torch.cuda.empty_cache()
            of_8b = self._times_of_8b(formats, found.skips)
            self.more[f"times_us_{name}"] = {"captured": times[name], "8b": of_8b}
            self.progress(f"{name}: {shares[name]}, us {times[name]}, of 8B heads {of_8b}")
        self.more["shares"] = shares
        metric = "of cold blocks at 8K the values that are read, epsilon 0.03, captured attention"
        yield Row(SHARE, metric, "1", "lower", shares["k8v4"]["read"])
        metric = "a step over captured attention at 32K, epsilon 0.03"
        ours, theirs = times["k8v4"]
        yield Row(SPEEDUP, metric, "us", "lower", ours, PEER, theirs)

    def _times_of_8b(self, formats: Formats, skips: torch.Tensor) -> tuple[float, float, float]:
        """8 x 32K of an 8B Llama's heads, whose values are random, skipped as captured ones are and
        never read again: with skips, without, and which share of blocks is skipped. Contexts are
        cold alone. Where a head skips all of its blocks, they are read again, for nothing else is
        there; such captured heads are left out."""
        (batch, context_len), *_ = SHAPES
        sets = sets_of(cold_bounds((context_len,) * batch), formats, MIN_SET_BYTES)
        blocks = context_len // 64
        masks = skips.flatten(0, 1)
        masks = masks[(masks == 0).any(1)]
        if not len(masks):
            raise MeasurementFailed("every captured head skips all of its cold blocks")
        masks = masks[torch.arange(batch * NUM_KV_HEADS, device="cuda") * 7 % len(masks)]
        masks = masks.repeat(1, blocks // masks.shape[1] + 1)[:, :blocks]
        masks = masks.reshape(batch, NUM_KV_HEADS, blocks).contiguous()
        skipping_us = _skip_us(sets, masks, NO_HEAD_IS_TOO_MUCH)
        return skipping_us, decode_us(sets), masks.float().mean().item()

    def _capture(self) -> Captured:
        if self._captured is None:
            assert self.model is not None
            self._captured = capture(self.model, CAPTURED_TOKENS, NUM_STEPS, "cuda")
            self.progress(f"captured {tuple(self._captured.keys.shape)}")
        return self._captured


def _skip_us(sets: Sequence[Contexts], skips: torch.Tensor, epsilon: float) -> float:
    """Of attention, what is read again, and the merge."""
    batch, num_kv_heads, _ = skips.shape
    query = torch.randn(batch, NUM_HEADS, SIZE, device="cuda").bfloat16()
    masses = torch.empty(*skips.shape, NUM_HEADS // num_kv_heads, device="cuda")
    left_out = skips.clone()
    reach = torch.full((batch, num_kv_heads), 0.01, device="cuda")

    def call(index: int) -> object:
        arguments = sets[index % len(sets)].arguments()
        return tiered_skip(query, *arguments, skips, masses, left_out, reach, epsilon)

    return graph_us(call)


def _list_us(batch: int, blocks: int, formats: Formats) -> float:
    """A layer's share of a choice for NUM_LAYERS."""
    rows = NUM_LAYERS * batch
    masses = torch.randn(rows, NUM_KV_HEADS, blocks, NUM_HEADS // NUM_KV_HEADS, device="cuda")
    lse = torch.full((rows, NUM_HEADS), 5.0, device="cuda")
    bounds = cold_bounds((64 * blocks,) * batch).cuda()
    return graph_us(lambda _: skip_list(masses, lse, bounds, formats, 0.01)) / NUM_LAYERS
