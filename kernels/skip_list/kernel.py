"""A program chooses for a KV head of a row. What its first blocks weigh stays in registers while
the limit is found; those beyond are read for each halving."""

import triton
import triton.language as tl

from kernels.kernel import kernel, variants
from kernels.skip_list import reference
from kernels.skip_list.reference import CONTRACT
from kernels.tiered_decode.tiles import no_tiles

LOG2_E = tl.constexpr(1.4426950408889634)
NUM_HALVINGS = tl.constexpr(reference.NUM_HALVINGS)


@triton.jit
def load_sums(lse_ptr, group, ROWS: tl.constexpr):
    """Of each query, as logarithms to base 2; beyond the last one of that."""
    sums = no_tiles()
    for row in tl.static_range(ROWS):
        sums += (tl.load(lse_ptr + tl.minimum(row, group - 1)) * LOG2_E,)
    return sums


@triton.jit
def load_shares(masses_ptr, sums, start, num_cold, group, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Of BLOCKS blocks from `start` on: the greatest of a block's shares, as a logarithm to base 2,
    and its share of each query."""
    block = start + tl.arange(0, BLOCKS)
    greatest = tl.full((BLOCKS,), float("-inf"), tl.float32)
    masses_ptr += block * group
    shares = no_tiles()
    for row in tl.static_range(ROWS):
        mask = (block < num_cold) & (row < group)
        share = tl.load(masses_ptr + row, mask=mask, other=float("-inf"))
        share -= sums[row]
        greatest = tl.maximum(greatest, share)
        shares += (tl.exp2(share),)
    return greatest, shares


@triton.jit
def sums_of_light(blocks, limit, ROWS: tl.constexpr):
    """Of each query, over blocks whose greatest share is at most the limit."""
    greatest, shares = blocks
    chosen = no_tiles()
    for row in tl.static_range(ROWS):
        chosen += (tl.sum(tl.where(greatest <= limit, shares[row], 0.0), 0),)
    return chosen


@triton.jit
def added(some, others, ROWS: tl.constexpr):
    sums = no_tiles()
    for row in tl.static_range(ROWS):
        sums += (some[row] + others[row],)
    return sums


@triton.jit
def store_chosen(skips_ptr, greatest, limit, start, num_cold, blocks, BLOCKS: tl.constexpr):
    block = start + tl.arange(0, BLOCKS)
    is_skipped = (greatest <= limit) & (block < num_cold)
    tl.store(skips_ptr + block, is_skipped.to(tl.int32), mask=block < blocks)


@triton.jit
def choose(
    masses_ptr,
    skips_ptr,
    sums,
    num_cold,
    blocks,
    group,
    budget,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Blocks past the first BLOCKS come in tiles of TILE; there are none if that is as many."""
    held = load_shares(masses_ptr, sums, 0, num_cold, group, ROWS, BLOCKS)
    high = tl.log2(budget)
    low = high - tl.log2(tl.maximum(num_cold, 1).to(tl.float32))
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        chosen = sums_of_light(held, middle, ROWS)
        if TILE < BLOCKS:
            for start in range(BLOCKS, num_cold, TILE):
                others = load_shares(masses_ptr, sums, start, num_cold, group, ROWS, TILE)
                chosen = added(chosen, sums_of_light(others, middle, ROWS), ROWS)
        most = chosen[0]
        for row in tl.static_range(1, ROWS):
            most = tl.maximum(most, chosen[row])
        fits = most <= budget
        low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
    store_chosen(skips_ptr, held[0], low, 0, num_cold, blocks, BLOCKS)
    for start in range(BLOCKS, blocks, TILE):
        others = (
            held
            if TILE == BLOCKS
            else load_shares(masses_ptr, sums, start, num_cold, group, ROWS, TILE)
        )
        store_chosen(skips_ptr, others[0], low, start, num_cold, blocks, TILE)


@kernel(contract=CONTRACT, variants=variants({}, reference.SERVED_METAS, aligned=[True]))
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
    TILE: tl.constexpr,
    FEW: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)  # of all rows
    bounds_ptr += 4 * (head // kv_heads % sequences)
    last = tl.load(bounds_ptr + (1 if VALUE_BITS == 4 else 2))
    num_cold = (last - tl.load(bounds_ptr)) // 64
    sums = load_sums(lse_ptr + head * group, group, ROWS)
    masses_ptr += head * blocks * group
    skips_ptr += head * blocks
    if FEW > 0 and num_cold <= FEW:
        choose(masses_ptr, skips_ptr, sums, num_cold, blocks, group, budget, ROWS, FEW, FEW)
        return
    choose(masses_ptr, skips_ptr, sums, num_cold, blocks, group, budget, ROWS, BLOCKS, TILE)
