"""A program attends with a tile of rows of one KV head over the blocks that they see, keys in
ascending order: FlashAttention-2's online softmax.

The heads of a group are packed: row r of a chunk is its token r // group, head r % group. What a
row's result is made of depends on its position alone: tiles of keys begin at multiples of TOKENS,
and a tile that a row does not see leaves the row's numbers as they are, to the bit.

Where the rows are too few to fill the GPU, several programs share the tiles of keys of one tile of
rows, and a kernel of its own merges what each of them made, by the logarithms, to base 2, of the
sums of the exponentials. How many programs they are changes a row's bits.
"""

import triton
import triton.language as tl

from kernels.kernel import SERVED, Variants, kernel, variants
from kernels.paged_prefill.reference import (
    BLOCK_SIZE,
    CONTRACT,
    MERGE_CONTRACT,
    MERGE_META,
    METAS,
    SPLIT_CONTRACT,
)


def bundled(*windowed: int) -> Variants:
    """Of the models that are served; another one is compiled when it is asked for."""
    metas = [{**meta, "WINDOWED": each} for meta in METAS[:2] for each in windowed]
    return variants({"query": SERVED}, metas, aligned=(True,))


LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: it may be subtracted from itself


@triton.jit
def attend(query, keys, values, hidden, attended, total, peak, scale, HIDES: tl.constexpr):
    """One more tile of keys, and those `hidden` to a row out of it -> attended, total, peak."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    if HIDES:
        scores = tl.where(hidden, float("-inf"), scores)
    highest = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -highest[:, None]))
    fading = tl.exp2(peak - highest)
    total = total * fading + tl.sum(weights, axis=1)
    attended = attended * fading[:, None]
    attended = tl.dot(weights.to(values.dtype), values, attended, input_precision="ieee")
    return attended, total, highest


@triton.jit
def block_of(table, tile, blocks, TOKENS: tl.constexpr, PAGE: tl.constexpr = BLOCK_SIZE):
    """The block in which a tile of keys lies, int64."""
    block = tl.load(table + tile * TOKENS // PAGE).to(tl.int64)
    tl.device_assert((block >= 0) & (block < blocks), "a block beyond the cache")
    return block


@triton.jit
def place(block, tile, TOKENS: tl.constexpr, PAGE: tl.constexpr = BLOCK_SIZE):
    """The slot of the first key of a tile."""
    return block * PAGE + tile * TOKENS % PAGE


@triton.jit
def attend_rows(
    query_ptr,
    query_starts_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    lse_ptr,
    query_token_stride,
    query_head_stride,
    size,
    blocks,
    kv_heads,
    max_blocks,
    group,
    window,
    scale,
    splits,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """With all the keys that the rows see; if SPLIT, with one of `splits` shares of them, and then
    what a row's scores sum to is stored as well: minus infinity where it sees none of its share."""
    kv_head, split = tl.program_id(0), 0
    if SPLIT:
        split = kv_head // kv_heads
        kv_head = kv_head % kv_heads
    sequence = tl.program_id(2)
    start = tl.load(query_starts_ptr + sequence)
    query_len = tl.load(query_starts_ptr + sequence + 1) - start
    context_len = tl.load(context_lens_ptr + sequence).to(tl.int32)
    tl.device_assert((query_len >= 0) & (query_len <= context_len), "a chunk beyond its context")
    # The tiles that see most come first, so that no long one is left over at the end.
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    num_rows = query_len * group
    tl.device_assert(num_rows <= tl.num_programs(1) * ROWS, "a chunk longer than max_query_len")
    if first_row >= num_rows:
        return

    # Rows past the last one attend like it, and are not stored.
    row = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)
    token = row // group
    head = kv_head * group + row - token * group
    position = context_len - query_len + token
    columns = tl.arange(0, BLOCK)[None, :]
    is_column = columns < size
    token = (start + token).to(tl.int64)
    rows = token * query_token_stride + head.to(tl.int64) * query_head_stride
    is_query = (row >= 0)[:, None] & is_column
    query = tl.load(query_ptr + rows[:, None] + columns, mask=is_query, other=0.0)

    # In tiles of keys: all rows see those from `begin` to `whole`, some see those up to `end`.
    first = context_len - query_len + first_row // group
    last = context_len - query_len + (tl.minimum(first_row + ROWS, num_rows) - 1) // group
    begin, whole, end = 0, (first + 1) // TOKENS, last // TOKENS + 1
    if WINDOWED:
        begin = tl.maximum(first + 1 - window, 0) // TOKENS
    if SPLIT:
        share = tl.cdiv(end - begin, splits)
        begin += split * share  # past the end, of more splits than tiles
        end = tl.minimum(begin + share, end)
        whole = tl.minimum(tl.maximum(whole, begin), end)
    if WINDOWED:
        whole = begin

    token_stride = kv_heads * size
    key = tl.arange(0, TOKENS)
    lanes = key[:, None] * token_stride + kv_head * size + columns
    table = block_tables_ptr + sequence * max_blocks
    scale = scale * LOG2E
    attended = tl.zeros([ROWS, BLOCK], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], LOWEST, tl.float32)
    # Read a turn ahead: looked up on the way to the keys, it would halve the depth of the pipeline.
    block = block_of(table, tl.minimum(begin, end - 1), blocks, TOKENS)
    for tile in range(begin, whole):
        offset = place(block, tile, TOKENS) * token_stride
        block = block_of(table, tl.minimum(tile + 1, end - 1), blocks, TOKENS)
        keys = tl.load(key_cache_ptr + offset + lanes, mask=is_column, other=0.0)
        values = tl.load(value_cache_ptr + offset + lanes, mask=is_column, other=0.0)
        attended, total, peak = attend(
            query, keys, values, None, attended, total, peak, scale, HIDES=False
        )
    for tile in range(whole, end):
        offset = place(block, tile, TOKENS) * token_stride
        block = block_of(table, tl.minimum(tile + 1, end - 1), blocks, TOKENS)
        ahead = tile * TOKENS + key[None, :] - position[:, None]
        hidden = ahead > 0
        if WINDOWED:
            hidden = hidden | (ahead <= -window)
        is_seen = is_column & (tile * TOKENS + key <= last)[:, None]
        # What lies beyond may be NaN, and zero times NaN is NaN.
        keys = tl.load(key_cache_ptr + offset + lanes, mask=is_seen, other=0.0)
        values = tl.load(value_cache_ptr + offset + lanes, mask=is_seen, other=0.0)
        attended, total, peak = attend(
            query, keys, values, hidden, attended, total, peak, scale, HIDES=True
        )

    stored = (token * kv_heads * group + head) * splits + split
    is_row = first_row + tl.arange(0, ROWS) < num_rows
    if SPLIT:
        sees_none = total == 0
        total = tl.where(sees_none, 1.0, total)
        lse = tl.where(sees_none, float("-inf"), peak + tl.log2(total))
        tl.store(lse_ptr + stored, lse, mask=is_row)
    attended = (attended / total[:, None]).to(out_ptr.dtype.element_ty)
    places = stored[:, None] * size + columns
    tl.store(out_ptr + places, attended, mask=is_row[:, None] & is_column)


@kernel(contract=CONTRACT, variants=bundled(0, 1))
def paged_prefill_kernel(
    query_ptr,
    query_starts_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    out_ptr,
    query_token_stride,
    query_head_stride,
    size,
    blocks,
    kv_heads,
    max_blocks,
    group,
    window,
    scale,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    attend_rows(
        query_ptr,
        query_starts_ptr,
        key_cache_ptr,
        value_cache_ptr,
        block_tables_ptr,
        context_lens_ptr,
        out_ptr,
        out_ptr,
        query_token_stride,
        query_head_stride,
        size,
        blocks,
        kv_heads,
        max_blocks,
        group,
        window,
        scale,
        1,
        ROWS,
        BLOCK,
        TOKENS,
        WINDOWED,
        False,
    )


@kernel(contract=SPLIT_CONTRACT, variants=bundled(0))
def paged_prefill_split_kernel(
    query_ptr,
    query_starts_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    partial_ptr,
    partial_lse_ptr,
    query_token_stride,
    query_head_stride,
    size,
    blocks,
    kv_heads,
    max_blocks,
    group,
    window,
    scale,
    splits,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    attend_rows(
        query_ptr,
        query_starts_ptr,
        key_cache_ptr,
        value_cache_ptr,
        block_tables_ptr,
        context_lens_ptr,
        partial_ptr,
        partial_lse_ptr,
        query_token_stride,
        query_head_stride,
        size,
        blocks,
        kv_heads,
        max_blocks,
        group,
        window,
        scale,
        splits,
        ROWS,
        BLOCK,
        TOKENS,
        WINDOWED,
        True,
    )


@kernel(
    contract=MERGE_CONTRACT,
    variants=variants({"out": SERVED}, [MERGE_META], aligned=(True,)),
)
def paged_prefill_merge_kernel(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    splits,
    size,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (columns < size)[None, :]
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([COLUMNS], tl.float32)
    peak = tl.full([1], LOWEST, tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        place = row * splits + split
        lse = tl.load(partial_lse_ptr + place, mask=split < splits, other=float("-inf"))
        partials = partial_ptr + place[:, None] * size + columns[None, :]
        partial = tl.load(partials, mask=(split < splits)[:, None] & is_column, other=0.0)
        highest = tl.maximum(peak, tl.max(lse, axis=0, keep_dims=True))
        weights = tl.exp2(lse - highest)
        fading = tl.exp2(peak - highest)
        total = total * fading + tl.sum(weights, axis=0, keep_dims=True)
        merged = merged * fading + tl.sum(weights[:, None] * partial, axis=0)
        peak = highest
    merged = (merged / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * size + columns, merged, mask=columns < size)
