"""A program appends some heads of one token, key and value together."""

import triton.language as tl

from kernels.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from kernels.kernel import SERVED, kernel, variants
from kernels.kv_append.reference import CONTRACT, METAS


# Steps call rope_append; this is for tools, which compile other dtypes when they come.
@kernel(
    contract=CONTRACT,
    variants=variants({"key": SERVED}, METAS, unaligned_metas=METAS[-1:]),
)
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
    wait_for_earlier_kernels()
    let_next_kernel_start()
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
