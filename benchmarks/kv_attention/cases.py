"""What is measured, and its bars: on an H200, one layer of an 8B Llama, a new token a sequence."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.command import Progress
from benchmarks.errors import MeasurementFailed
from benchmarks.kernels.timing import graph_us
from benchmarks.kv_attention.contexts import (
    NUM_HEADS,
    SIZE,
    Contexts,
    cold_bounds,
    sets_of,
    tiered_bounds,
)
from benchmarks.kv_attention.flash_attention import flash_attention_us
from benchmarks.results import Row
from kernels.tiered_decode import reference
from kernels.tiered_decode.api import tiered_decode
from kernels.tiered_plan.reference import Formats

MIN_SET_BYTES = 587 * 10**6
INT4, K8V4, INT8 = Formats(4, 4), Formats(8, 4), Formats(8, 8)
PEER = "FlashAttention 3, bfloat16"
MIXED = "attn_mixed_32k_vs_int4"
MAX_MIXED_SHARE = 1.08
# From half to one and a half of 32K, none of whole blocks, 32K in the mean.
MIXED_LENGTHS = tuple(32768 + (2 * row - 7) * 2331 for row in range(8))
ERROR, WORST_ERROR = "attn_rel_error", "attn_rel_error_worst"
MAX_ERROR, MAX_WORST_ERROR = 1e-3, 2e-3


@dataclass(frozen=True)
class Speed:
    name: str
    batch: int
    context_len: int
    formats: Formats
    min_ratio: float

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.context_len,) * self.batch


SPEEDS = (
    Speed("attn_int4_b1_128k", 1, 131072, INT4, 3.0),
    Speed("attn_int4_b8_32k", 8, 32768, INT4, 3.0),
    Speed("attn_int4_b32_8k", 32, 8192, INT4, 3.0),
    Speed("attn_k8v4_b32_8k", 32, 8192, K8V4, 2.2),
    Speed("attn_int8_b32_8k", 32, 8192, INT8, 1.8),
)
NAMES = (*(each.name for each in SPEEDS), MIXED, ERROR, WORST_ERROR)


def rows(only: Sequence[str] | None, progress: Progress) -> Iterator[Row]:
    """Raises MeasurementFailed."""
    wanted = NAMES if only is None else only
    peers: dict[tuple[int, ...], float | None] = {}
    for speed in SPEEDS:
        if speed.name in wanted:
            if speed.lengths not in peers:
                peers[speed.lengths] = _peer_us(speed.lengths, progress)
            yield _speed_row(speed, peers[speed.lengths], progress)
    if MIXED in wanted:
        yield _mixed_row(progress)
    if ERROR in wanted or WORST_ERROR in wanted:
        yield from _error_rows(progress)


def decode_us(sets: Sequence[Contexts]) -> float:
    """Of attention and its merge; the plan is made once a step, for all layers."""
    query = _query(len(sets[0].bounds))

    def call(index: int) -> object:
        slabs, *others = sets[index % len(sets)].arguments()
        return tiered_decode(query, slabs, *others)

    return graph_us(call)


def _speed_row(speed: Speed, peer_us: float | None, progress: Progress) -> Row:
    sets = sets_of(cold_bounds(speed.lengths), speed.formats, MIN_SET_BYTES)
    ours_us = decode_us(sets)
    ratio = f"{peer_us / ours_us:.2f}x" if peer_us else "-"
    progress(f"{speed.name}: {ours_us:.1f} us, FlashAttention 3 {peer_us} us, {ratio}")
    del sets
    torch.cuda.empty_cache()
    return Row(speed.name, "time", "us", "lower", ours_us, PEER, peer_us, speed.min_ratio, "ratio")


def _peer_us(lengths: Sequence[int], progress: Progress) -> float | None:
    """None where it cannot be had: its rows say that nothing was measured beside."""
    try:
        return flash_attention_us(lengths, MIN_SET_BYTES, progress)
    except MeasurementFailed as exc:
        progress(f"{exc}")
        return None
    finally:
        torch.cuda.empty_cache()


def _mixed_row(progress: Progress) -> Row:
    equal = (sum(MIXED_LENGTHS) // len(MIXED_LENGTHS),) * len(MIXED_LENGTHS)
    mixed_us, pure_us = (
        decode_us(sets_of(bounds, INT4, MIN_SET_BYTES))
        for bounds in (tiered_bounds(MIXED_LENGTHS), cold_bounds(equal))
    )
    progress(f"{MIXED}: {mixed_us:.1f} us, of 4 bits alone {pure_us:.1f} us")
    torch.cuda.empty_cache()
    peer = "4 bits alone, equal lengths"
    bar = 1 / MAX_MIXED_SHARE
    return Row(MIXED, "time", "us", "lower", mixed_us, peer, pure_us, bar, "ratio")


def _error_rows(progress: Progress) -> Iterator[Row]:
    """Of float32 results, against float64 on the same cache: ||difference|| / ||exact||."""
    usual, worst = [], []
    for name, sharpness, bounds in _error_contexts():
        for formats in (INT4, K8V4, INT8):
            errors = errors_of(sets_of(bounds, formats, 1, sharpness)[0])
            progress(f"{ERROR}: {name}, {formats}: {errors[0]:.2e}, of a row {errors[1]:.2e}")
            worst.append(errors[0])
            if sharpness == 1.0:
                usual.append(errors[0])
            torch.cuda.empty_cache()
    metric = "relative error, scores of unit size"
    yield Row(ERROR, metric, "1", "lower", max(usual), floor=MAX_ERROR)
    metric = "relative error, also of scores 4 times as large"
    yield Row(WORST_ERROR, metric, "1", "lower", max(worst), floor=MAX_WORST_ERROR)


def _error_contexts() -> Iterator[tuple[str, float, torch.Tensor]]:
    for sharpness in (1.0, 4.0):
        for lengths in ((4096,), (131072,)):
            yield f"cold, {lengths}, sharpness {sharpness}", sharpness, cold_bounds(lengths)
        lengths = (3901, 128, 32768, 700)
        yield f"tiers, {lengths}, sharpness {sharpness}", sharpness, tiered_bounds(lengths)


def errors_of(contexts: Contexts) -> tuple[float, float]:
    """Of all, and the greatest of one head of one sequence."""
    query = _query(len(contexts.bounds))
    came, _ = tiered_decode(query, *contexts.arguments(), torch.float32)
    expected, _ = reference.tiered_decode(
        query,
        contexts.slabs,
        contexts.key_tables,
        contexts.value_tables,
        contexts.bounds.cpu(),
        contexts.formats,
        SIZE**-0.5,
    )
    differences = (came - expected).norm(dim=-1)
    each = differences / expected.norm(dim=-1)
    return float(differences.norm() / expected.norm()), float(each.max())


def _query(batch: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(batch)
    shape = (batch, NUM_HEADS, SIZE)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


Measure = Callable[[Sequence[str] | None, Progress], Iterator[Row]]
