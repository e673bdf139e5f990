"""Sampling from the vocabulary of Llama 3: logits as a bfloat16 matrix product rounds them."""

import math
from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Arguments, Case
from benchmarks.kernels.tune import Knob, grid
from kernels.sampling import reference
from kernels.sampling.api import sample

VOCAB = 128256
NUM_LIKELY = 64  # tokens a row that stand out, as after a prompt
GREEDY_BAR_US, FILTERS_BAR_US = 15, 150
# temperature, min-p, top-p, top-k: rows take turns.
GREEDY = [(0.0, 0.0, 1.0, 0)]
MIXED = [*GREEDY, (1.0, 0.0, 1.0, 0), (0.7, 0.05, 0.95, 50), (1.0, 0.0, 0.9, 0)]
TOP_P = MIXED[-1:]
Filters = list[tuple[float, float, float, int]]
FORMS = grid(GROUPS=(512,), WIDTH=(16, 32, 64, 128), num_warps=(4, 8, 16, 32))
SAMPLING_KNOBS = {
    "sample_b32": Knob("kernels.sampling.reference", "DRAW_METAS", FORMS),
    "sample_b32, flat top-p": Knob("kernels.sampling.reference", "DRAW_METAS", FORMS),
    "sample_b32, greedy": Knob(
        "kernels.sampling.reference", "GREATEST_META", grid(num_warps=(1, 2, 4, 8))
    ),
    "sample_b32, top-p": Knob(
        "kernels.sampling.reference", "WEIGH_METAS", grid(GROUPS=(512,), num_warps=(2, 4, 8, 16))
    ),
}


def sampling_cases() -> Iterator[Case]:
    yield _case("sample_b32", 32, MIXED, FILTERS_BAR_US)
    yield _case("sample_b32, greedy", 32, GREEDY, GREEDY_BAR_US)
    yield _case("sample_b32, top-p", 32, TOP_P, FILTERS_BAR_US)
    yield _case("sample_b32, flat top-p", 32, TOP_P, FILTERS_BAR_US, is_flat=True)
    yield _case("sample_b1", 1, MIXED[1:2], FILTERS_BAR_US)
    yield _case("sample_b1, greedy", 1, GREEDY, GREEDY_BAR_US)
    yield _case("sample_b1, filters", 1, MIXED[2:3], FILTERS_BAR_US)


def _case(
    name: str, num_rows: int, filters: Filters, bar_us: float, *, is_flat: bool = False
) -> Case:
    return Case(
        name,
        f"{num_rows} x {VOCAB} float32",
        sample,
        _sorted,
        lambda: _arguments(num_rows, filters, is_flat),
        num_bytes=4 * num_rows * VOCAB,
        bar_us=bar_us,
        reference=reference.sample,
    )


def _arguments(num_rows: int, filters: Filters, is_flat: bool) -> Arguments:
    logits = 3 * torch.randn(num_rows, VOCAB, device="cuda")
    if not is_flat:
        likely = torch.randint(VOCAB, (num_rows, NUM_LIKELY), device="cuda")
        logits.scatter_add_(1, likely, 12 + 2 * torch.randn(likely.shape, device="cuda"))
    rows = [filters[row % len(filters)] for row in range(num_rows)]
    floats = torch.tensor([row[:3] for row in rows], device="cuda")
    top_ks = torch.tensor([row[3] for row in rows], device="cuda")
    seeds, positions = torch.randint(2**62, (2, num_rows), device="cuda")
    numbers = torch.stack((top_ks, seeds), dim=1)
    return logits.bfloat16().float(), floats, numbers, positions


def _sorted(
    logits: torch.Tensor, floats: torch.Tensor, numbers: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """As one would write it in torch: one sort, and every filter for every row, whether or not the
    row has it; the host waits for nothing."""
    temperatures, min_p, top_p = floats.unbind(1)
    top_k, seeds = numbers.unbind(1)
    divisors = temperatures.clamp(min=reference.MIN_TEMPERATURE)[:, None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / divisors
    scaled = scaled.masked_fill(scaled < min_p.log()[:, None], -math.inf)
    largest_first = scaled.sort(-1, descending=True).values
    rank = torch.where(top_k > 0, top_k, logits.shape[1]) - 1
    floor = largest_first.gather(1, rank[:, None])
    mass = largest_first.masked_fill(largest_first < floor, -math.inf).exp()
    mass = mass.cumsum(-1, dtype=torch.float64)
    place = torch.searchsorted(mass, mass[:, -1:] * top_p[:, None])
    nucleus = largest_first.gather(1, place.clamp(max=logits.shape[1] - 1))
    floor = torch.where(top_p[:, None] < 1, torch.maximum(floor, nucleus), floor)
    mass = scaled.masked_fill(scaled < floor, -math.inf).exp().cumsum(-1, dtype=torch.float64)
    uniforms = reference.counter_uniform(seeds, positions)
    drawn = torch.searchsorted(mass, uniforms[:, None] * mass[:, -1:], right=True).squeeze(-1)
    return torch.where(temperatures > 0, drawn, logits.argmax(-1))
