"""Entry point of the op."""

import torch

from kernels.paged_attention import reference
from kernels.paged_attention.reference import causal_mask

__all__ = ["causal_mask", "paged_attention"]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """query [num_sequences, query_len, num_heads, head_dim] -> like query.

    caches [num_blocks, block_size, num_kv_heads, head_dim]; block_tables [num_sequences,
    max_num_blocks] int64, padded with any valid block; mask from `causal_mask` over
    max_num_blocks * block_size keys. Either num_sequences or query_len is 1.
    """
    num_sequences, query_len, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, cache_head_dim = key_cache.shape
    assert key_cache.shape == value_cache.shape, (key_cache.shape, value_cache.shape)
    assert head_dim == cache_head_dim, (query.shape, key_cache.shape)
    assert num_heads % num_kv_heads == 0, (query.shape, key_cache.shape)
    assert num_sequences == 1 or query_len == 1, query.shape
    expected = (num_sequences, query_len, block_tables.shape[1] * block_size)
    assert mask.shape == expected, (mask.shape, expected)
    return reference.paged_attention(query, key_cache, value_cache, block_tables, mask, scale)
