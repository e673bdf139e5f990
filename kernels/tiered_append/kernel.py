"""A program turns and rotates some query heads of one token, or appends some of its KV heads."""

import triton
import triton.language as tl

from kernels.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from kernels.kernel import kernel, variants
from kernels.tiered_append import reference
from kernels.tiered_append.reference import CONTRACT, METAS

SLAB = tl.constexpr(reference.SLAB)


@triton.constexpr_function
def log2_of(power):
    return power.bit_length() - 1


@triton.jit
def turned(x_ptr, cos_ptr, sin_ptr, mask, HALF: tl.constexpr):
    """Both halves of the heads at x_ptr, float32."""
    column = tl.arange(0, HALF)[None, :]
    first = tl.load(x_ptr + column, mask=mask).to(tl.float32)
    second = tl.load(x_ptr + HALF + column, mask=mask).to(tl.float32)
    first_cos = tl.load(cos_ptr + column).to(tl.float32)
    second_cos = tl.load(cos_ptr + HALF + column).to(tl.float32)
    first_sin = tl.load(sin_ptr + column).to(tl.float32)
    second_sin = tl.load(sin_ptr + HALF + column).to(tl.float32)
    return first * first_cos - second * first_sin, second * second_cos + first * second_sin


@triton.jit
def rotated(first, second, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """The halves of heads, [HEADS, SIZE / 2] float32, to rotated heads [HEADS, SIZE].

    Neighbours give a sum and a difference. The sums then come first, so that the next neighbours
    were two apart; after all steps each is where it was.
    """
    HALF: tl.constexpr = SIZE // 2
    x = tl.join(first + second, first - second).permute(0, 2, 1).reshape(2 * HEADS, HALF)
    for _ in tl.static_range(log2_of(HALF)):
        first, second = x.reshape(2 * HEADS, HALF // 2, 2).split()
        x = tl.join(first + second, first - second).permute(0, 2, 1).reshape(2 * HEADS, HALF)
    return x.reshape(HEADS, SIZE) * SIZE**-0.5


@triton.jit
def slot_at(slots_ptr, num_slabs):
    slot = tl.load(slots_ptr)
    tl.device_assert((slot >= -1) & (slot // SLAB < num_slabs), "a slot beyond the arena")
    return slot


@kernel(contract=CONTRACT, variants=variants({}, METAS[:2], aligned=[True]))
def tiered_append_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    key_slabs_ptr,
    value_slabs_ptr,
    key_slots_ptr,
    value_slots_ptr,
    out_ptr,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    num_keys,
    num_values,
    heads,
    kv_heads,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    wait_for_earlier_kernels()
    let_next_kernel_start()
    HALF: tl.constexpr = SIZE // 2
    query_groups = tl.cdiv(heads, HEADS)
    groups = query_groups + tl.cdiv(kv_heads, HEADS)
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    column = tl.arange(0, SIZE)[None, :]
    cos = cos_ptr + token * SIZE
    sin = sin_ptr + token * SIZE

    if group < query_groups:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        is_head = head < heads
        head = head.to(tl.int64)
        query = query_ptr + token * query_token_stride + head * query_head_stride
        first, second = turned(query, cos, sin, tl.broadcast_to(is_head, (HEADS, HALF)), HALF)
        mask = tl.broadcast_to(is_head, (HEADS, SIZE))
        out = out_ptr + (token * heads + head) * SIZE + column
        tl.store(out, rotated(first, second, HEADS, SIZE).to(tl.bfloat16), mask=mask)
    else:
        key_slot = slot_at(key_slots_ptr + token, num_keys)
        value_slot = slot_at(value_slots_ptr + token, num_values)
        head = (group - query_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        is_head = head < kv_heads
        head = head.to(tl.int64)
        mask = tl.broadcast_to(is_head, (HEADS, SIZE))
        value = value_ptr + token * value_token_stride + head * value_head_stride + column
        values = tl.load(value, mask=mask)
        key = key_ptr + token * key_token_stride + head * key_head_stride
        first, second = turned(key, cos, sin, tl.broadcast_to(is_head, (HEADS, HALF)), HALF)
        keys = rotated(first, second, HEADS, SIZE).to(tl.bfloat16)
        key_slabs = key_slabs_ptr.to(tl.pointer_type(tl.bfloat16))
        stored = key_slabs + (key_slot * kv_heads + head) * SIZE + column
        tl.store(stored, keys, mask=mask & (key_slot >= 0))
        value_slabs = value_slabs_ptr.to(tl.pointer_type(tl.bfloat16))
        stored = value_slabs + (value_slot * kv_heads + head) * SIZE + column
        tl.store(stored, values, mask=mask & (value_slot >= 0))
