"""Chunks of prompts over a paged cache of which all that they must not read is poison."""

from collections.abc import Sequence

import torch

from kernels.paged_prefill.reference import BLOCK_SIZE

NOWHERE = (10**9, -7)  # what a block table may hold beyond a context


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged_cache(
    context_lens: Sequence[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of each sequence; the same in shuffled blocks of two caches, NaN elsewhere;
    and the block tables."""
    counts = [-(-context_len // BLOCK_SIZE) for context_len in context_lens]
    shuffled = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed))
    tables = torch.tensor(NOWHERE).repeat(len(counts), max(counts, default=0) // 2 + 1)
    shape = (len(shuffled), BLOCK_SIZE, num_kv_heads, head_dim)
    caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in "kv"]
    plain = []
    for index, (context_len, own) in enumerate(
        zip(context_lens, shuffled[1:].split(counts), strict=True)
    ):
        tables[index, : len(own)] = own
        slots = (own[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:context_len]
        pair = [
            normal(context_len, num_kv_heads, head_dim, dtype=dtype, seed=2 * index + each + 10)
            for each in (0, 1)
        ]
        for cache, tokens in zip(caches, pair, strict=True):
            cache.flatten(0, 1)[slots] = tokens
        plain.append((pair[0], pair[1]))
    return plain, caches[0], caches[1], tables


def starts_of(query_lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)


def chunks(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    window: int | None = None,
) -> tuple[object, ...]:
    """Arguments of paged_prefill; heads: of queries, of keys."""
    _, key_cache, value_cache, tables = paged_cache(context_lens, heads[1], head_dim, dtype)
    query = normal(sum(query_lens), heads[0], head_dim, dtype=dtype)
    lens = torch.tensor(context_lens, dtype=torch.int64)
    caches = (key_cache, value_cache, tables, lens)
    return query, starts_of(query_lens), *caches, scale, window, max(query_lens, default=0)
