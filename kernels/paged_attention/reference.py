"""The specification: gather the blocks, mask, softmax. Few large torch operations a call."""

import torch
import torch.nn.functional as F


def causal_mask(
    context_lens: torch.Tensor,
    query_len: int,
    num_keys: int,
    window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Additive mask [num_sequences, query_len, num_keys]: 0 where a query sees a key, else -inf.

    The last query of a sequence stands at position `context_lens - 1`; a query sees itself and
    everything before it, at most `window` keys.
    """
    keys = torch.arange(num_keys, device=context_lens.device)
    last = torch.arange(1 - query_len, 1, device=context_lens.device)
    queries = (context_lens[:, None] - 1 + last)[:, :, None]  # [num_sequences, query_len, 1]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
        hidden, float("-inf")
    )


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
    max_num_blocks * block_size keys. Hidden slots still meet a zero probability, so every slot of
    the caches must be finite. Either num_sequences or query_len is 1.
    """
    keys = _gather(key_cache, block_tables)
    values = _gather(value_cache, block_tables)
    if query.shape[1] == 1:
        return _decode(query, keys, values, mask, scale)
    return _chunk(query[0], keys[0], values[0], mask[0], scale)[None]


def _gather(cache: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """[num_sequences, num_keys, num_kv_heads, head_dim]; three times faster than indexing."""
    blocks = cache.index_select(0, block_tables.flatten())
    return blocks.view(block_tables.shape[0], -1, *cache.shape[2:])


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """The heads of one KV head are the rows of one small matrix product."""
    grouped = query.view(query.shape[0], keys.shape[2], -1, query.shape[3])
    attended = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), mask[:, None], scale=scale
    )
    return attended.reshape(query.shape)


def _chunk(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """KV heads take the batch dimension: their keys are shared by a stride of zero, not copied."""
    num_kv_heads = keys.shape[1]
    grouped = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    num_groups = grouped.shape[1]
    attended = F.scaled_dot_product_attention(
        grouped,  # [num_kv_heads, num_groups, query_len, head_dim]
        keys.transpose(0, 1)[:, None].expand(-1, num_groups, -1, -1),
        values.transpose(0, 1)[:, None].expand(-1, num_groups, -1, -1),
        mask[None, None],
        scale=scale,
    )
    return attended.permute(2, 0, 1, 3).reshape(query.shape)
