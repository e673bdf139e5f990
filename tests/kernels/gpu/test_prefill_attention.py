"""Paged prefill on the GPU: right at hostile sizes, whole and split, the same bits however a prompt
is cut where that is asked, in a CUDA graph, and in a cache beyond 2^31 elements."""

from functools import partial

import pytest
import torch

from kernels.paged_prefill import reference
from kernels.paged_prefill.api import paged_prefill
from tests.kernels.contexts import normal, paged
from tests.kernels.gpu.compare import assert_gpu_equals_reference, on_gpu
from tests.kernels.paged_chunks import chunks, starts_of
from tests.kernels.tolerances import ATTENTION, DTYPES, ROUNDINGS

pytestmark = pytest.mark.gpu


def assert_equals(arguments: tuple[object, ...], dtype: torch.dtype) -> None:
    assert_gpu_equals_reference(
        paged_prefill,
        reference.paged_prefill,
        *arguments,
        rtol=ROUNDINGS[dtype],
        atol=ATTENTION[dtype],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 65, 300])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [([1], [1]), ([63, 0, 65], [64, 9, 65]), ([3, 200], [700, 1000]), ([129], [1024]), ([], [])],
)
def test_chunks(
    query_lens: list[int], context_lens: list[int], window: int | None, dtype: torch.dtype
) -> None:
    assert_equals(chunks(query_lens, context_lens, (8, 2), 64, dtype, window=window), dtype)


@pytest.mark.parametrize("head_dim", [16, 63, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (32, 8)])
def test_heads(heads: tuple[int, int], head_dim: int) -> None:
    arguments = chunks([40, 150], [300, 150], heads, head_dim, torch.bfloat16, head_dim**-0.5)
    assert_equals(arguments, torch.bfloat16)


SPLITS = [
    (splits, window, torch.bfloat16, (63, 64, 128))
    for splits in (2, 3, 5, 40)
    for window in (None, 1, 300)
]
# The bundle has bfloat16: of the others, which are compiled when they come, a few.
SPLITS += [(splits, 300, dtype, (64,)) for splits in (3, 40) for dtype in DTYPES[:2]]
SPLITS += [(5, None, dtype, (128,)) for dtype in DTYPES[:2]]


@pytest.mark.parametrize(("splits", "window", "dtype", "head_dims"), SPLITS)
def test_splits_merge_to_the_same(
    splits: int,
    window: int | None,
    dtype: torch.dtype,
    head_dims: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kernels.paged_prefill.api.fitting_splits", lambda *_: splits)
    for head_dim in head_dims:
        scale = head_dim**-0.5
        query_lens, context_lens = [17, 0, 65, 1], [1000, 9, 65, 700]
        arguments = chunks(query_lens, context_lens, (8, 2), head_dim, dtype, scale, window)
        assert_equals(arguments, dtype)


@pytest.mark.parametrize("query_len", [1, 16, 64, 100])
def test_few_rows_of_a_long_context(query_len: int) -> None:
    arguments = chunks([query_len], [20000], (8, 2), 128, torch.bfloat16, 128**-0.5)
    assert_equals(arguments, torch.bfloat16)


def test_a_captured_split_follows_the_lengths_of_its_replay() -> None:
    arguments = on_gpu(chunks([64, 3], [5000, 4000], (8, 2), 128, torch.bfloat16, 0.1))
    call, lens = partial(paged_prefill, *arguments), arguments[5]
    call()  # loads the code
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended = call()
    for context_lens in ([5000, 4000], [64, 3], [3333, 700]):
        lens.copy_(torch.tensor(context_lens))
        graph.replay()
        assert torch.equal(attended, call())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 500])
def test_cuts_and_company_do_not_change_a_bit(window: int | None, dtype: torch.dtype) -> None:
    *caches, tables, _ = paged([1500, 300], 2, 128, dtype=dtype, num_spare=200)
    query = normal(1500, 8, 128, dtype=dtype)

    def attend(query_lens: list[int], ends: list[int]) -> torch.Tensor:
        rows = [query[end - length : end] for length, end in zip(query_lens, ends, strict=True)]
        contexts = (*caches, tables[: len(ends)], torch.tensor(ends))
        arguments = (torch.cat(rows), starts_of(query_lens), *contexts)
        return paged_prefill(*on_gpu(arguments), 0.1, window, deterministic=True)

    whole = attend([1500], [1500])
    parts = [attend([n, 300], [end, 300])[:n] for n, end in ((61, 61), (939, 1000), (500, 1500))]

    assert torch.equal(torch.cat(parts), whole)


def test_a_cache_beyond_int32() -> None:
    """16 GiB of it, of which two blocks are read."""
    query, starts, *caches, _, lens, scale, window, longest = on_gpu(
        chunks([70], [100], (4, 2), 128, torch.bfloat16)
    )
    shape = (2**18 + 1, 64, 2, 128)
    far = torch.tensor([[2**18, 2**17 + 1]], device="cuda")
    near = torch.tensor([[1, 2]], device="cuda")
    wide = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    for cache, each in zip(wide, caches, strict=True):
        each.nan_to_num_(7.0)
        cache[far[0]] = each[near[0]]
    assert wide[0].numel() > 2**31

    attended = paged_prefill(query, starts, *wide, far, lens, scale, window, longest)

    expected = paged_prefill(query, starts, *caches, near, lens, scale, window, longest)
    assert torch.equal(attended, expected)
