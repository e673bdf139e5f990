"""Against attention written out token by token, in float64, with Python's own loops."""

import pytest
import torch

from kernels.paged_attention.api import causal_mask, paged_attention

BLOCK_SIZE = 4


def attend_by_hand(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context_len: int,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """One sequence: query [query_len, num_heads, head_dim], keys [context_len, num_kv_heads, .]"""
    query_len, num_heads, _ = query.shape
    num_groups = num_heads // keys.shape[1]
    attended = torch.empty(query.shape, dtype=torch.float64)
    for row in range(query_len):
        position = context_len - query_len + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(num_heads):
            seen = slice(first, position + 1)
            scores = keys[seen, head // num_groups].double() @ query[row, head].double() * scale
            attended[row, head] = scores.softmax(0) @ values[seen, head // num_groups].double()
    return attended


def scatter(context_lens: list[int], num_kv_heads: int, head_dim: int, seed: int):
    """Contiguous K and V of each sequence, and the same in shuffled blocks of a poisoned cache."""
    generator = torch.Generator().manual_seed(seed)
    max_num_blocks = -(-max(context_lens) // BLOCK_SIZE)
    num_blocks = len(context_lens) * max_num_blocks + 1
    order = iter(torch.randperm(num_blocks - 1, generator=generator).add(1).tolist())
    caches = [torch.full((num_blocks, BLOCK_SIZE, num_kv_heads, head_dim), 1e4) for _ in "kv"]
    tables, plain = [], []
    for context_len in context_lens:
        table = [next(order) for _ in range(-(-context_len // BLOCK_SIZE))]
        pair = [torch.randn(context_len, num_kv_heads, head_dim, generator=generator) for _ in "kv"]
        for cache, tensor in zip(caches, pair, strict=True):
            for position in range(context_len):
                block = table[position // BLOCK_SIZE]
                cache[block, position % BLOCK_SIZE] = tensor[position]
        tables.append(table + [0] * (max_num_blocks - len(table)))
        plain.append(pair)
    return plain, caches, torch.tensor(tables)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (4, 1), (4, 4)])
@pytest.mark.parametrize(
    ("query_len", "context_lens"),
    [(1, [1]), (1, [9, 1, 12, 4]), (5, [5]), (3, [11]), (4, [16])],
    ids=["first token", "uneven decodes", "whole prompt", "chunk", "chunk at a block border"],
)
def test_equals_attention_by_hand(
    query_len: int, context_lens: list[int], num_heads: int, num_kv_heads: int, window: int | None
) -> None:
    head_dim, scale = 6, 0.37
    plain, caches, tables = scatter(context_lens, num_kv_heads, head_dim, seed=query_len)
    query = torch.randn(
        len(context_lens),
        query_len,
        num_heads,
        head_dim,
        generator=torch.Generator().manual_seed(9),
    )
    num_keys = tables.shape[1] * BLOCK_SIZE
    mask = causal_mask(torch.tensor(context_lens), query_len, num_keys, window, torch.float32)

    attended = paged_attention(query, *caches, tables, mask, scale)

    for row, (context_len, pair) in enumerate(zip(context_lens, plain, strict=True)):
        expected = attend_by_hand(query[row], *pair, context_len, window, scale)
        torch.testing.assert_close(attended[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_fused_projection_is_read_through_its_strides() -> None:
    plain, caches, tables = scatter([7], 2, 6, seed=1)
    fused = torch.randn(3, 9, 6, generator=torch.Generator().manual_seed(2))
    query = fused[:, :4][None]
    mask = causal_mask(torch.tensor([7]), 3, 8, None, torch.float32)

    attended = paged_attention(query, *caches, tables, mask, 1.0)

    expected = attend_by_hand(query[0], *plain[0], 7, None, 1.0)
    torch.testing.assert_close(attended[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_decode_from_a_fused_projection() -> None:
    plain, caches, tables = scatter([7, 3], 2, 6, seed=1)
    query = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(2))[:, :4].unflatten(
        0, (2, 1)
    )
    mask = causal_mask(torch.tensor([7, 3]), 1, 8, None, torch.float32)

    attended = paged_attention(query, *caches, tables, mask, 1.0)

    for row, context_len in enumerate((7, 3)):
        expected = attend_by_hand(query[row], *plain[row], context_len, None, 1.0)
        torch.testing.assert_close(attended[row].double(), expected, atol=1e-5, rtol=1e-5)


def test_a_mask_of_another_shape_is_refused() -> None:
    _, caches, tables = scatter([7], 2, 6, seed=1)
    with pytest.raises(AssertionError):
        paged_attention(torch.zeros(1, 3, 4, 6), *caches, tables, torch.zeros(1, 3, 7), 1.0)
