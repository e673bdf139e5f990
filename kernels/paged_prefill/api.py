"""Entry point of the op."""

from typing import Any

import torch

from kernels.bundle.driver import Grid
from kernels.launch import Launcher, cdiv, num_sms, runs_kernels
from kernels.metas import narrowest
from kernels.paged_prefill import reference
from kernels.paged_prefill.reference import BLOCK_SIZE
from kernels.paged_prefill.splits import fitting_splits

NUM_SMS_WITHOUT_A_GPU = 40
PROGRAMS_PER_SM = 2  # at once, by the shared memory of the form for heads of 128

MODULE = "kernels.paged_prefill.kernel"
_launch = Launcher(reference.CONTRACT, f"{MODULE}:paged_prefill_kernel")
_launch_split = Launcher(reference.SPLIT_CONTRACT, f"{MODULE}:paged_prefill_split_kernel")
_launch_merge = Launcher(reference.MERGE_CONTRACT, f"{MODULE}:paged_prefill_merge_kernel")


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
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """query [num_tokens, num_heads, head_dim], chunks of sequences one after the other: the last
    tokens of each context -> like query, contiguous. A query sees itself and what is before it, at
    most `window` keys.

    query_starts [num_sequences + 1] int32: chunk i is rows [starts[i], starts[i + 1]); all rows
    belong to one. caches [num_blocks, 64, num_kv_heads, head_dim]. block_tables [num_sequences,
    max_num_blocks] int64: entries beyond a context are never read; how wide it is tells how long
    contexts may be. context_lens [num_sequences] int64: tokens in the cache, the chunk's own too.
    max_query_len: of the longest chunk at least, None where nothing better is known than
    num_tokens. head_dim <= 256 on a GPU.

    deterministic: a row depends on its sequence and position alone, bit for bit, not on how the
    scheduler cut the prompt, nor on the batch; few rows of long contexts then take longer, for
    their keys are not shared among programs. Raises ContractError.
    """
    num_heads, head_dim = query.shape[1:]
    kv_heads, max_blocks = key_cache.shape[2], block_tables.shape[1]
    assert num_heads % kv_heads == 0, (query.shape, key_cache.shape)
    assert len(query_starts) == len(context_lens) + 1, (query_starts.shape, context_lens.shape)
    if not runs_kernels(query):
        caches = (key_cache, value_cache, block_tables, context_lens)
        return reference.paged_prefill(
            query, query_starts, *caches, scale, window, deterministic=deterministic
        )
    group = num_heads // kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    inputs = (query, query_starts, key_cache, value_cache, block_tables, context_lens)
    sizes = (*query.stride()[:2], head_dim, key_cache.shape[0], kv_heads, max_blocks, group)
    scalars = (*sizes, window or reference.INT32_MAX, scale)
    is_wide = query.dtype == torch.float32
    metas = reference.FLOAT32_METAS if is_wide else reference.METAS
    chosen = narrowest(reference.CONTRACT, metas, "BLOCK", "size", (*inputs, out, *scalars))
    meta = {**chosen, "WINDOWED": int(window is not None)}
    longest = len(query) if max_query_len is None else max_query_len
    grid = (kv_heads, cdiv(longest * group, meta["ROWS"]), len(context_lens))
    splits = 1 if deterministic else _splits(query, grid, group, max_blocks, window, meta["ROWS"])
    if splits == 1:
        _launch(grid, *inputs, out, *scalars, **meta)
    else:
        _attend_in_splits(splits, grid, inputs, out, scalars, meta)
    return out


def _splits(
    query: torch.Tensor, grid: Grid, group: int, max_blocks: int, window: int | None, rows: int
) -> int:
    """By what the host knows: not how long each chunk is, but of how many rows all are."""
    kv_heads, tiles, chunks = grid
    tiles_with_rows = min(tiles * chunks, len(query) * group // rows + chunks)
    seen = max_blocks * BLOCK_SIZE
    if window is not None:
        seen = min(seen, window + cdiv(rows, group))
    max_programs = PROGRAMS_PER_SM * num_sms(query.device, NUM_SMS_WITHOUT_A_GPU)
    return fitting_splits(seen, kv_heads * tiles_with_rows, max_programs)


def _attend_in_splits(
    splits: int,
    grid: Grid,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    scalars: tuple[Any, ...],
    meta: dict[str, int],
) -> None:
    num_tokens, num_heads, head_dim = out.shape
    shape = (num_tokens, num_heads, splits)
    partial = torch.empty((*shape, head_dim), dtype=torch.float32, device=out.device)
    partial_lse = torch.empty(shape, dtype=torch.float32, device=out.device)
    kv_heads, tiles, chunks = grid
    grid = (splits * kv_heads, tiles, chunks)
    _launch_split(grid, *inputs, partial, partial_lse, *scalars, splits, **meta)
    merge = reference.MERGE_META
    grid = (num_tokens * num_heads, cdiv(head_dim, merge["COLUMNS"]), 1)
    _launch_merge(grid, partial, partial_lse, out, splits, head_dim, **merge)
