"""Decode attention: right at any length, window and group of heads, deterministic where asked, the
same in a CUDA graph, and far into a large cache."""

from itertools import cycle

import pytest
import torch

from kernels.paged_decode import reference
from kernels.paged_decode.api import paged_decode, paged_decode_lse
from tests.kernels.contexts import BLOCK_SIZE, normal, paged
from tests.kernels.gpu.compare import assert_gpu_equals_reference, on_gpu
from tests.kernels.tolerances import DTYPES, ROUNDINGS

pytestmark = pytest.mark.gpu
# Of values of unit size: probabilities are rounded to the dtype, float32 is multiplied in parts.
ATOL = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
LENGTHS = [1, 63, 64, 65, 200, 0, 1000, 4097]
HEADS = [(8, 8, 64), (9, 3, 64), (32, 8, 128), (7, 1, 96), (32, 1, 128), (16, 2, 256)]
WINDOWS = [None, 1, 100, 1024]
# Of each other dtype every window, and every number of heads, but not each with each.
CASES = [(*each, window, torch.bfloat16) for each in HEADS for window in WINDOWS]
CASES += [(*each, window, torch.float16) for each, window in zip(HEADS, cycle(WINDOWS))]
CASES += [(*each, window, torch.float32) for each, window in zip(HEADS, cycle(WINDOWS[::-1]))]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "window", "dtype"), CASES)
def test_equals_its_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    query = normal(len(LENGTHS), num_heads + 2, head_dim, dtype=dtype)[:, 1:-1]
    contexts = paged(LENGTHS, num_kv_heads, head_dim, dtype=dtype)

    for op in (paged_decode_lse, deterministic):
        assert_gpu_equals_reference(
            op,
            reference.paged_decode_lse,
            query,
            *contexts,
            head_dim**-0.5,
            window,
            rtol=2 * ROUNDINGS[dtype],
            atol=ATOL[dtype],
        )


@pytest.mark.parametrize("window", [None, 100])
def test_contexts_that_nobody_cuts_equal_the_reference(window: int | None) -> None:
    """More rows than programs run at once: nothing is merged."""
    dtype, lengths = torch.bfloat16, LENGTHS * 20
    query, contexts = normal(len(lengths), 8, 128, dtype=dtype), paged(lengths, 4, 128, dtype=dtype)
    tolerances = {"rtol": 2 * ROUNDINGS[dtype], "atol": ATOL[dtype]}
    arguments = (query, *contexts, 0.1, window)
    assert_gpu_equals_reference(
        paged_decode_lse, reference.paged_decode_lse, *arguments, **tolerances
    )


def deterministic(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    return paged_decode_lse(*arguments, deterministic=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_a_row_has_the_same_bits_in_any_batch(window: int | None, dtype: torch.dtype) -> None:
    lengths = [1 + 97 * each for each in range(64)]
    query = normal(64, 8, 128, dtype=dtype).cuda()
    key_cache, value_cache, tables, context_lens = on_gpu(paged(lengths, 2, 128, dtype=dtype))

    def attended(rows: slice, width: int) -> torch.Tensor:
        table = tables[rows, :width].contiguous()
        batch = query[rows], key_cache, value_cache, table, context_lens[rows]
        return paged_decode(*batch, 0.1, window, deterministic=True)

    together = attended(slice(0, 64), tables.shape[1])

    for row in (0, 1, 17, 40, 63):
        rows = slice(row, row + 1)
        alone = attended(rows, -(-lengths[row] // BLOCK_SIZE))
        assert torch.equal(alone, together[rows])
    assert torch.equal(attended(slice(5, 22), tables.shape[1]), together[5:22])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_follows_lengths_tables_and_padding(deterministic: bool) -> None:
    dtype = torch.bfloat16
    query = normal(4, 8, 128, dtype=dtype).cuda()
    contexts = on_gpu(paged([1000, 70, 1, 5], 2, 128, dtype=dtype))
    tables, context_lens = contexts[2:]
    graph = torch.cuda.CUDAGraph()
    paged_decode(query, *contexts, 0.1, deterministic=deterministic)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = paged_decode(query, *contexts, 0.1, deterministic=deterministic)

    for lengths, order in (([70, 1, 1000, 5], [1, 2, 0, 3]), ([64, 0, 900, 0], [0, 0, 2, 2])):
        tables.copy_(tables[order].clone())
        context_lens.copy_(torch.tensor(lengths))
        query.normal_()
        graph.replay()
        expected = paged_decode(query, *contexts, 0.1, deterministic=deterministic)
        assert torch.equal(out, expected)
        by_hand = reference.paged_decode(query, *contexts, 0.1)
        torch.testing.assert_close(out, by_hand, rtol=2**-6, atol=2**-7)


def test_at_the_end_of_a_huge_cache() -> None:
    num_blocks = 2**31 // (BLOCK_SIZE * 8 * 128) + 2
    caches = torch.zeros(2, num_blocks, BLOCK_SIZE, 8, 128, device="cuda", dtype=torch.bfloat16)
    caches[:, -1].normal_()
    query = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.tensor([[num_blocks - 1]], device="cuda")
    lengths = torch.tensor([50], device="cuda")

    far = paged_decode(query, *caches, table, lengths, 0.1)

    assert torch.equal(far, paged_decode(query, *caches[:, -1:], table * 0, lengths, 0.1))
