"""Decode attention over slabs: right for any format, length and group of heads, planned as its
reference plans, and the same in a CUDA graph whose tensors change."""

import pytest
import torch

from kernels.tiered_decode import reference
from kernels.tiered_decode.api import tiered_decode
from kernels.tiered_plan import reference as planning
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import FORMATS, Formats
from tests.kernels.gpu.compare import on_gpu
from tests.kernels.slab_caches import Cache, bounds_of, slab_cache

pytestmark = pytest.mark.gpu
LENGTHS = [1000, 0, 1, 64, 65, 130, 720, 1609]
# Of results of about 1: a weight and a scaled query are rounded to float16.
RTOL, ATOL = 0.0, 2e-3
MAX_ERROR = 1e-3


def assert_right(
    query: torch.Tensor, cache: Cache, formats: Formats, num_runs: int, sharpness: float = 1.0
) -> None:
    scale = sharpness * query.shape[-1] ** -0.5
    key_tables, value_tables, bounds = on_gpu(list(cache[1:]))
    slabs = reference.Slabs(*on_gpu(list(cache.slabs)))
    plan = tiered_plan(bounds, num_runs, formats)
    assert torch.equal(plan.cpu(), planning.tiered_plan(cache.bounds, num_runs, formats))

    arguments = (slabs, key_tables, value_tables, plan, formats, scale)
    out, lse = tiered_decode(query.cuda(), *arguments, torch.float32)

    tables = cache.key_tables, cache.value_tables, cache.bounds
    expected, expected_lse = reference.tiered_decode(query, cache.slabs, *tables, formats, scale)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-4, atol=2e-3)
    error = (out.cpu() - expected).norm() / expected.norm()
    assert error < MAX_ERROR, error


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"),
    [
        (32, 8, 128),
        (9, 3, 64),
        (7, 1, 128),
        (16, 1, 64),
        (20, 2, 128),
        (2, 2, 64),
        (8, 4, 256),
        (16, 1, 256),
    ],
)
@pytest.mark.parametrize("num_runs", [1, 5, 132])
def test_equals_its_reference(
    num_runs: int, num_heads: int, num_kv_heads: int, size: int, formats: Formats
) -> None:
    cache = slab_cache(bounds_of(LENGTHS), num_kv_heads, size, formats)
    query = torch.randn(len(LENGTHS), num_heads + 1, size).bfloat16()[:, 1:]
    assert_right(query, cache, formats, num_runs)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "query_len"),
    [
        (32, 8, 128, 2),
        (32, 8, 128, 4),
        (9, 3, 64, 3),
        (5, 1, 128, 3),
        (16, 2, 64, 2),
        (2, 2, 64, 4),
        (4, 2, 256, 4),
        (8, 2, 256, 3),
    ],
)
@pytest.mark.parametrize("num_runs", [1, 5, 132])
def test_several_queries_equal_their_reference(
    num_runs: int, query_len: int, num_heads: int, num_kv_heads: int, size: int, formats: Formats
) -> None:
    """Of contexts shorter than that, and of as few hot tokens as can be."""
    bounds = [*bounds_of([*LENGTHS, 2, 3]).tolist(), [64, 64, 64, 66], [0, 64, 128, 131]]
    cache = slab_cache(torch.tensor(bounds).int(), num_kv_heads, size, formats)
    query = torch.randn(len(bounds), query_len, num_heads + 1, size).bfloat16()[:, :, 1:]
    assert_right(query, cache, formats, num_runs)


@pytest.mark.parametrize("formats", FORMATS)
def test_of_one_format_alone(formats: Formats) -> None:
    bounds = torch.tensor([[0, length, length, length] for length in (2048, 64)]).int()
    cache = slab_cache(bounds, 2, 128, formats)
    assert_right(torch.randn(2, 8, 128).bfloat16(), cache, formats, 13)


@pytest.mark.parametrize("grains", [(1, 1), (1, 2), (2, 1)])
def test_grains_are_those_of_the_arenas(grains: tuple[int, int]) -> None:
    cache = slab_cache(bounds_of(LENGTHS), 2, 128, FORMATS[2], grains=grains)
    assert_right(torch.randn(len(LENGTHS), 8, 128).bfloat16(), cache, FORMATS[2], 13)


@pytest.mark.parametrize("formats", FORMATS)
def test_in_a_graph_whose_sequences_change(formats: Formats) -> None:
    bounds = bounds_of([1000, 700, 300, 90])
    cache = slab_cache(bounds, 2, 128, formats)
    query = torch.randn(4, 8, 128).bfloat16()
    on_device = on_gpu([query, *cache.slabs, *cache[1:]])
    scale, num_runs = 0.1, 17

    def step() -> torch.Tensor:
        plan = tiered_plan(on_device[7], num_runs, formats)
        slabs = reference.Slabs(*on_device[1:5])
        arguments = (on_device[0], slabs, *on_device[5:7], plan, formats, scale)
        return tiered_decode(*arguments, torch.float32)[0]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for order in ([3, 1, 0, 2], [0, 0, 0, 0]):
        on_device[5].copy_(cache.key_tables[order])
        on_device[6].copy_(cache.value_tables[order])
        on_device[7].copy_(bounds[order])
        graph.replay()
        tables = cache.key_tables[order], cache.value_tables[order], bounds[order]
        expected, _ = reference.tiered_decode(query, cache.slabs, *tables, formats, scale)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("formats", FORMATS)
def test_two_runs_give_the_same_bits(formats: Formats) -> None:
    cache = slab_cache(bounds_of([3000, 1500]), 2, 128, formats)
    slabs = reference.Slabs(*on_gpu(list(cache.slabs)))
    key_tables, value_tables, bounds = on_gpu(list(cache[1:]))
    query = torch.randn(2, 8, 128, device="cuda").bfloat16()
    plan = tiered_plan(bounds, 40, formats)
    first, second = (
        tiered_decode(query, slabs, key_tables, value_tables, plan, formats, 0.1) for _ in "ab"
    )
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
