"""A program turns some query heads of one token, or it turns and appends some of its KV heads."""

import triton.language as tl

from kernels.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from kernels.kernel import SERVED, kernel, variants
from kernels.rope_append.reference import CONTRACT, METAS
from kernels.rotary.kernel import rotated


@kernel(contract=CONTRACT, variants=variants({"query": SERVED}, METAS, unaligned_metas=METAS[-1:]))
def rope_append_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    out_ptr,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    blocks,
    block_size,
    heads,
    kv_heads,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    wait_for_earlier_kernels()
    let_next_kernel_start()
    query_groups = tl.cdiv(heads, HEADS)
    groups = query_groups + tl.cdiv(kv_heads, HEADS)
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    columns = tl.arange(0, HALF)[None, :]
    is_column = columns < half
    cos = cos_ptr + token * 2 * half
    sin = sin_ptr + token * 2 * half

    if group < query_groups:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (head < heads) & is_column
        head = head.to(tl.int64)
        offsets = token * query_token_stride + head * query_head_stride + columns
        first, second = rotated(query_ptr, cos, sin, offsets, columns, half, mask, is_column)
        out = out_ptr + (token * heads + head) * 2 * half + columns
        tl.store(out, first, mask=mask)
        tl.store(out + half, second, mask=mask)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        tl.device_assert((slot >= -1) & (slot // block_size < blocks), "a slot beyond the cache")
        head = (group - query_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (head < kv_heads) & is_column
        head = head.to(tl.int64)
        value = value_ptr + token * value_token_stride + head * value_head_stride + columns
        first_value = tl.load(value, mask=mask)
        second_value = tl.load(value + half, mask=mask)
        offsets = token * key_token_stride + head * key_head_stride + columns
        first, second = rotated(key_ptr, cos, sin, offsets, columns, half, mask, is_column)
        cached = (slot * kv_heads + head) * 2 * half + columns
        mask = mask & (slot >= 0)
        tl.store(key_cache_ptr + cached, first, mask=mask)
        tl.store(key_cache_ptr + cached + half, second, mask=mask)
        tl.store(value_cache_ptr + cached, first_value, mask=mask)
        tl.store(value_cache_ptr + cached + half, second_value, mask=mask)
