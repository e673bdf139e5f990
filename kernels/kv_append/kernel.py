"""A program appends some heads of one token, key and value together, turned on the way or not."""

import triton.language as tl

from kernels.contract import FLOATS
from kernels.kernel import kernel, variants
from kernels.kv_append.reference import CONTRACT, METAS, ROPE_CONTRACT, ROPE_METAS
from kernels.rotary.kernel import rotated


@kernel(contract=CONTRACT, variants=variants({"key": FLOATS}, METAS, unaligned_metas=METAS[-1:]))
def kv_append_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    blocks,
    block_size,
    heads,
    size,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head_blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (head < heads) & (columns < size)
    head = head.to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    tl.device_assert((slot >= -1) & (slot // block_size < blocks), "a slot beyond the cache")

    key_offsets = token * key_token_stride + head * key_head_stride + columns
    value_offsets = token * value_token_stride + head * value_head_stride + columns
    key = tl.load(key_ptr + key_offsets, mask=mask)
    value = tl.load(value_ptr + value_offsets, mask=mask)
    cached = (slot * heads + head) * size + columns
    tl.store(key_cache_ptr + cached, key, mask=mask & (slot >= 0))
    tl.store(value_cache_ptr + cached, value, mask=mask & (slot >= 0))


@kernel(
    contract=ROPE_CONTRACT,
    variants=variants({"key": FLOATS}, ROPE_METAS, unaligned_metas=ROPE_METAS[-1:]),
)
def kv_append_rope_kernel(
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    blocks,
    block_size,
    heads,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    head_blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    head = tl.program_id(0) % head_blocks * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    is_column = columns < half
    mask = (head < heads) & is_column
    head = head.to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token)
    tl.device_assert((slot >= -1) & (slot // block_size < blocks), "a slot beyond the cache")

    value = value_ptr + token * value_token_stride + head * value_head_stride + columns
    first_value = tl.load(value, mask=mask)
    second_value = tl.load(value + half, mask=mask)
    turns = token * 2 * half
    key_offsets = token * key_token_stride + head * key_head_stride + columns
    first_key, second_key = rotated(
        key_ptr, cos_ptr + turns, sin_ptr + turns, key_offsets, columns, half, mask, is_column
    )
    cached = (slot * heads + head) * 2 * half + columns
    mask = mask & (slot >= 0)
    tl.store(key_cache_ptr + cached, first_key, mask=mask)
    tl.store(key_cache_ptr + cached + half, second_key, mask=mask)
    tl.store(value_cache_ptr + cached, first_value, mask=mask)
    tl.store(value_cache_ptr + cached + half, second_value, mask=mask)
