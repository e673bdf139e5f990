"""A program reads one split of the context for the query heads of one KV head (up to ROWS of them),
in tiles within a block of the cache; a second kernel merges the splits, where there are several.

Scores are kept times log2(e), for exp2. A split's tiles are a matter of its own context's length.
"""

import triton
import triton.language as tl

from kernels.contract import Contract
from kernels.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from kernels.kernel import SERVED, Variant, kernel, variants
from kernels.paged_decode import reference
from kernels.paged_decode.reference import (
    CONTRACT,
    MERGE_CONTRACT,
    MERGE_META_OF_FEW,
    MERGE_META_OF_MANY,
    METAS,
    launched,
)
from kernels.prefetch import prefetch_lines

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
ROWS = tl.constexpr(reference.ROWS)
SERVED_HEAD_DIM = 128
PRECISION = tl.constexpr("tf32x3")  # of fp32, by the tensor cores: to some 2^-21


@triton.jit
def cut(context_len, window, tile, most_splits, min_tiles):
    """(first tile that is seen, tile after the last, tiles of a split)"""
    first = tl.maximum(context_len - window, 0) // tile
    last = tl.cdiv(context_len, tile)
    return first, last, tl.maximum(tl.cdiv(last - first, most_splits), min_tiles)


def forms(contract: Contract) -> list[Variant]:
    """Of the models that are served; others are compiled when they come. An unaligned launch is
    refused."""
    metas = [launched(meta) for meta in METAS if meta["BLOCK"] <= SERVED_HEAD_DIM]
    return variants({"query": SERVED}, metas, aligned=[True])(contract)


@kernel(contract=CONTRACT, variants=forms)
def paged_decode_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    query_sequence_stride,
    query_head_stride,
    heads,
    blocks,
    block_size,
    kv_heads,
    max_blocks,
    size,
    splits,
    scale,
    window,
    most_splits,
    min_tiles,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    # Programs of the KV heads of one split follow each other: they read the same rows of memory.
    group = heads // kv_heads
    parts = tl.cdiv(group, ROWS)  # of a group that has more heads than a product has rows
    kv_head = tl.program_id(0) // parts
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens_ptr + sequence)
    tl.device_assert(
        (context_len >= 0) & (context_len <= max_blocks * block_size),
        "a context longer than its block table",
    )
    context_len = context_len.to(tl.int32)
    first, last, tiles = cut(context_len, window, TILE, most_splits, min_tiles)
    num_splits = tl.cdiv(last - first, tiles)
    tl.device_assert(num_splits <= splits, "a context longer than the greatest")
    begin = first + split * tiles
    has_tiles = begin < last
    table = block_tables_ptr + sequence * max_blocks
    token_stride = kv_heads * size
    tiles_per_block = block_size // TILE
    # The first tiles are under way while the kernel before ends, of which one may store a token.
    block = tl.load(table + begin // tiles_per_block, mask=has_tiles, other=0)
    tile_start = (block * block_size + begin % tiles_per_block * TILE) * token_stride
    rows = tl.arange(0, TILE)[:, None] * token_stride + kv_head * size
    LINES: tl.constexpr = (BLOCK + 63) // 64
    lines = rows + tl.minimum(tl.arange(0, LINES)[None, :] * 64, size - 1)
    prefetch_lines(key_cache_ptr + tile_start + lines)
    prefetch_lines(value_cache_ptr + tile_start + lines)
    wait_for_earlier_kernels()
    let_next_kernel_start()

    in_group = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    is_head = in_group < group
    head = (kv_head * group + in_group).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = (columns < size)[None, :]
    mask = is_head[:, None] & is_column
    place = (sequence * heads + head) * splits + split
    places = place[:, None] * size + columns[None, :]
    is_whole = splits == 1
    if not has_tiles:
        if is_whole:
            nothing = tl.zeros((ROWS, BLOCK), tl.float32).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + places, nothing, mask=mask)
            tl.store(lse_ptr + place, tl.full((ROWS,), float("-inf"), tl.float32), mask=is_head)
        return

    queries = query_ptr + sequence * query_sequence_stride + columns[None, :]
    query = tl.load(queries + head[:, None] * query_head_stride, mask=mask, other=0.0)

    greatest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    attended = tl.zeros((ROWS, BLOCK), tl.float32)
    in_tile = tl.arange(0, TILE)
    in_cache = in_tile[:, None] * token_stride + kv_head * size + columns[None, :]
    for tile in range(begin, tl.minimum(begin + tiles, last)):
        block = tl.load(table + tile // tiles_per_block)
        tl.device_assert((block >= 0) & (block < blocks), "a block beyond the cache")
        position = tile * TILE + in_tile
        is_seen = (position >= context_len - window) & (position < context_len)
        tile_start = (block * block_size + tile % tiles_per_block * TILE) * token_stride
        key = tl.load(key_cache_ptr + tile_start + in_cache, mask=is_column, other=0.0)
        # Not loaded where not seen: what was in a block before may be NaN, and zero times it too.
        is_loaded = is_seen[:, None] & is_column
        value = tl.load(value_cache_ptr + tile_start + in_cache, mask=is_loaded, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2_E)
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
        probabilities = tl.exp2(scores - new_greatest[:, None])
        shrink = tl.exp2(greatest - new_greatest)
        total = total * shrink + tl.sum(probabilities, axis=1)
        attended = attended * shrink[:, None]
        attended = tl.dot(probabilities.to(value.dtype), value, attended, input_precision=PRECISION)
        greatest = new_greatest

    attended = attended / total[:, None]
    lse = greatest + tl.log2(total)
    if is_whole:
        tl.store(out_ptr + places, attended.to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(lse_ptr + place, lse * LN_2, mask=is_head)
    else:
        tl.store(partial_ptr + places, attended, mask=mask)
        tl.store(partial_lse_ptr + place, lse, mask=is_head)


@kernel(
    contract=MERGE_CONTRACT,
    variants=variants({"out": SERVED}, [MERGE_META_OF_FEW, MERGE_META_OF_MANY], aligned=[True]),
)
def paged_decode_merge_kernel(
    partial_ptr,
    partial_lse_ptr,
    context_lens_ptr,
    out_ptr,
    lse_ptr,
    heads,
    splits,
    size,
    tile,
    window,
    most_splits,
    min_tiles,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    context_len = tl.load(context_lens_ptr + row // heads).to(tl.int32)
    wait_for_earlier_kernels()
    let_next_kernel_start()
    first, last, tiles = cut(context_len, window, tile, most_splits, min_tiles)
    num_splits = tl.cdiv(last - first, tiles)

    greatest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    merged = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        place = row * splits + split
        lse = tl.load(partial_lse_ptr + place, mask=split < num_splits, other=float("-inf"))
        mask = (split < num_splits)[:, None] & (columns < size)[None, :]
        partials = partial_ptr + place[:, None] * size + columns[None, :]
        partial = tl.load(partials, mask=mask, other=0.0)
        new_greatest = tl.maximum(greatest, tl.max(lse, axis=0, keep_dims=True))
        weights = tl.exp2(lse - new_greatest)
        shrink = tl.exp2(greatest - new_greatest)
        total = total * shrink + tl.sum(weights, axis=0, keep_dims=True)
        merged = merged * shrink + tl.sum(weights[:, None] * partial, axis=0)
        greatest = new_greatest

    out = tl.where((columns >= 0) & (num_splits > 0), merged / total, 0.0)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + columns, out, mask=columns < size)
    is_first = (tl.program_id(1) + tl.arange(0, 1)) == 0
    lse = (greatest + tl.log2(total)) * LN_2
    tl.store(lse_ptr + row + tl.arange(0, 1), lse, mask=is_first)
