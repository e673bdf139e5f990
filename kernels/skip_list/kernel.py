"""A program chooses for a KV head of a row; it looks at its blocks once for each halving."""

import triton
import triton.language as tl

from kernels.kernel import kernel, variants
from kernels.skip_list import reference
from kernels.skip_list.reference import CONTRACT

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(reference.LEAST)
GREATEST = tl.constexpr(reference.GREATEST)
NUM_HALVINGS = tl.constexpr(reference.NUM_HALVINGS)


@triton.jit
def shares_of(masses_ptr, start, num_cold, group, sums, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Of blocks from `start` on, [BLOCKS, ROWS], as logarithms to base 2."""
    block, row = start + tl.arange(0, BLOCKS), tl.arange(0, ROWS)
    mask = (block < num_cold)[:, None] & (row < group)[None, :]
    places = block[:, None] * group + row[None, :]
    return tl.load(masses_ptr + places, mask=mask, other=float("-inf")) - sums[None, :]


@kernel(contract=CONTRACT, variants=variants({}, [reference.SERVED_META], aligned=[True]))
def skip_list_kernel(
    masses_ptr,
    lse_ptr,
    bounds_ptr,
    skips_ptr,
    sequences,
    kv_heads,
    blocks,
    group,
    budget,
    VALUE_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)  # of all rows
    bounds_ptr += 4 * (head // kv_heads % sequences)
    last = tl.load(bounds_ptr + (1 if VALUE_BITS == 4 else 2))
    num_cold = (last - tl.load(bounds_ptr)) // 64
    row = tl.arange(0, ROWS)
    sums = tl.load(lse_ptr + head * group + row, mask=row < group, other=0.0) * LOG2_E
    masses_ptr += head * blocks * group
    skips_ptr += head * blocks
    low, high = LEAST, GREATEST
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        chosen = tl.zeros((ROWS,), tl.float32)
        for start in range(0, num_cold, BLOCKS):
            shares = shares_of(masses_ptr, start, num_cold, group, sums, ROWS, BLOCKS)
            is_light = tl.max(shares, 1) <= middle
            chosen += tl.sum(tl.where(is_light[:, None], tl.exp2(shares), 0.0), 0)
        fits = tl.max(chosen, 0) <= budget
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
    for start in range(0, blocks, BLOCKS):
        shares = shares_of(masses_ptr, start, num_cold, group, sums, ROWS, BLOCKS)
        block = start + tl.arange(0, BLOCKS)
        is_skipped = (tl.max(shares, 1) <= low) & (block < num_cold)
        tl.store(skips_ptr + block, is_skipped.to(tl.int32), mask=block < blocks)
