"""Entry point of the op."""

import torch

from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.metas import narrowest
from kernels.paged_prefill import reference

_launch = Launcher(reference.CONTRACT, "kernels.paged_prefill.kernel:paged_prefill_kernel")


def paged_prefill(
    query: torch.Tensor,
    query_starts: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    max_query_len: int | None = None,
) -> torch.Tensor:
    """query [num_tokens, num_heads, head_dim], chunks of sequences one after the other: the last
    tokens of each context -> like query, contiguous. A query sees itself and what is before it, at
    most `window` keys.

    query_starts [num_sequences + 1] int32: chunk i is rows [starts[i], starts[i + 1]); all rows
    belong to one. caches [num_blocks, 64, num_kv_heads, head_dim]. block_tables [num_sequences,
    max_num_blocks] int64: entries beyond a context are never read. context_lens [num_sequences]
    int64: tokens in the cache, the chunk's own too. max_query_len: of the longest chunk at least,
    None where nothing better is known than num_tokens. head_dim <= 256 on a GPU.

    Bitwise invariant: a row depends on its sequence and position alone, not on how the scheduler
    cut the prompt, nor on the batch. Raises ContractError.
    """
    num_tokens, num_heads, head_dim = query.shape
    kv_heads, max_blocks = key_cache.shape[2], block_tables.shape[1]
    assert num_heads % kv_heads == 0, (query.shape, key_cache.shape)
    assert len(query_starts) == len(context_lens) + 1, (query_starts.shape, context_lens.shape)
    if not runs_kernels(query):
        return reference.paged_prefill(
            query, query_starts, key_cache, value_cache, block_tables, context_lens, scale, window
        )
    group = num_heads // kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tensors = (query, query_starts, key_cache, value_cache, block_tables, context_lens, out)
    sizes = (*query.stride()[:2], head_dim, key_cache.shape[0], kv_heads, max_blocks, group)
    arguments = (*tensors, *sizes, window or reference.INT32_MAX, scale)
    is_wide = query.dtype == torch.float32
    metas = reference.FLOAT32_METAS if is_wide else reference.METAS
    meta = narrowest(reference.CONTRACT, metas, "BLOCK", "size", arguments)
    longest = num_tokens if max_query_len is None else max_query_len
    grid = (kv_heads, cdiv(longest * group, meta["ROWS"]), len(context_lens))
    _launch(grid, *arguments, **meta, WINDOWED=int(window is not None))
    return out
