"""What a program does with its share of the cold tier where some of it is skipped. FORM, FORMATS:
as in kernels/tiered_decode/tiers.py, of one part."""

import triton
import triton.language as tl

from kernels.tiered_decode.tiers import (
    added_scores,
    added_values,
    load_codes,
    load_key_meta,
    slabs_of,
)
from kernels.tiered_decode.tiles import IS_INTERPRETED, WEIGHT, accumulated, first_rows, weighed
from kernels.tiered_skip import rounding

LOG2_E = tl.constexpr(1.4426950408889634)
SUM_ERROR = tl.constexpr(rounding.SUM_ERROR)
LOST = tl.constexpr(rounding.LOST)


@triton.jit
def raised_by(query, factor, reach, ROWS: tl.constexpr):
    """Twice what a sum of exponentials can be off by, as a logarithm to base 2, [ROWS]. query: its
    halves, [16, ...]."""
    low, high = query[0].to(tl.float32), query[1].to(tl.float32)
    length = tl.sqrt(tl.sum(low * low, 1) + tl.sum(high * high, 1))
    if ROWS == 8:
        length, _ = length.reshape(2, 8).permute(1, 0).split()
    return 2 * (length * factor * reach + SUM_ERROR * LOG2_E)


@triton.jit
def log2_fast(x):
    """Within 2^-22, of x from 2^-126 on; of less, that of 0."""
    if IS_INTERPRETED:
        logarithm = tl.log2(x)
    else:
        logarithm = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return logarithm


@triton.jit
def load_codes_if(is_read, slabs_ptr, starts, places, BITS: tl.constexpr, SIZE: tl.constexpr):
    """As `load_codes`; nothing is read, and they are of no meaning, unless is_read."""
    if BITS == 4:
        low = tl.load(slabs_ptr + starts + places, mask=is_read)
        high = low
    else:
        at = slabs_ptr + starts[:, None] + places[None, :]
        low = tl.load(at, mask=is_read)
        high = tl.load(at + 16 * SIZE, mask=is_read)
    return low, high


@triton.jit
def load_value_meta_if(
    is_read, meta_ptr, block_slabs, head, kv_heads, BITS: tl.constexpr, GRAIN: tl.constexpr
):
    """As `load_value_meta`, and as `load_codes_if`."""
    slab, slabs = block_slabs
    if BITS // GRAIN == 4:  # of all 64 tokens
        slot = slab // GRAIN
        own = meta_ptr + (slot * kv_heads + head) * 128 + tl.arange(0, 64)
        scales = accumulated(tl.load(own, mask=is_read), 1, 2)
        zeros = accumulated(tl.load(own + 64, mask=is_read), 1, 2)
    else:
        places = ((slabs * kv_heads + head) * 128)[:, None] + tl.arange(0, 32)[None, :]
        scales = accumulated(tl.load(meta_ptr + places, mask=is_read), 2, 1)
        zeros = accumulated(tl.load(meta_ptr + 64 + places, mask=is_read), 2, 1)
    return scales, zeros


@triton.jit
def with_values(
    found,
    values,
    scales,
    zeros,
    weights,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The weighed codes, and the weighed zeros, with those of a block."""
    attended, attended_zeros = found
    weights = (weights * scales.to(tl.float32)[None, :]).to(tl.float16)
    unshrunk = tl.full((ROWS,), 1.0, tl.float32)
    attended = added_values(attended, unshrunk, values, weights, 0, BITS, WIDTH, ROWS)
    weights = weights.permute(1, 0).reshape(64, ROWS)
    zeros = tl.broadcast_to(zeros[None, :], (16, 64))
    return attended, tl.dot(zeros, weights, attended_zeros)


@triton.jit
def attend_unskipped(
    query,
    factor,
    raised,
    state,
    arenas,
    tables,
    blocks,
    skips_ptr,
    masses_ptr,
    group,
    head,
    kv_heads,
    FORMATS: tl.constexpr,
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `attend_quantised` of one part, where a block has zero in `skips`; stores the masses
    of all -> (state, the sums of weights of each lane of what was skipped, whether any was)."""
    SIZE: tl.constexpr = FORM[0]
    ROWS: tl.constexpr = FORM[1]
    KEY_BITS: tl.constexpr = FORMATS[0]
    VALUE_BITS: tl.constexpr = FORMATS[1]
    keys_ptr, values_ptr, key_meta_ptr, value_meta_ptr, num_keys, num_values = arenas
    greatest, total, attended, attended_zeros = state
    WIDTH: tl.constexpr = SIZE // 2
    key_places = tl.arange(0, 256 // KEY_BITS * WIDTH)
    value_places = tl.arange(0, 256 // VALUE_BITS * WIDTH)
    slab_bytes = kv_heads * (32 * SIZE)
    in_slab = head * (32 * SIZE)
    row = tl.arange(0, ROWS)
    masses_ptr += row
    raised -= WEIGHT
    skipped = tl.zeros((ROWS, 4), tl.float32)
    any_skipped = 0
    for block in tl.range(blocks[0], blocks[1], num_stages=STAGES):
        is_read = tl.load(skips_ptr + block) == 0
        value_slabs = slabs_of(tables[1], block, num_values, VALUE_BITS, FORMATS[3])
        key_slabs = slabs_of(tables[0], block, num_keys, KEY_BITS, FORMATS[2])
        key_starts = key_slabs[1] * slab_bytes + in_slab
        value_starts = value_slabs[1] * slab_bytes + in_slab
        key_slot = key_slabs[0] // FORMATS[2] * kv_heads + head
        keys = load_codes(keys_ptr, key_starts, key_places, KEY_BITS, SIZE)
        key_meta = load_key_meta(key_meta_ptr + key_slot * (2 * SIZE), 0, SIZE, 1)
        values = load_codes_if(is_read, values_ptr, value_starts, value_places, VALUE_BITS, SIZE)
        scales, zeros = load_value_meta_if(
            is_read, value_meta_ptr, value_slabs, head, kv_heads, VALUE_BITS, FORMATS[3]
        )
        scores = tl.zeros((16, 64), tl.float32)
        scores = added_scores(scores, query, keys, key_meta, 0, KEY_BITS, WIDTH, 1)
        scores = first_rows(scores, ROWS, 64)
        nothing = tl.zeros((ROWS, 4), tl.float32)
        weights, shrink, greatest, sums = weighed(scores, factor, greatest, nothing, ROWS, 64)
        mass = greatest + log2_fast(tl.sum(sums, 1) + LOST) + raised
        tl.store(masses_ptr + block * group, mass, mask=row < group)
        total = total * shrink[:, None] + tl.where(is_read, sums, 0.0)
        skipped = skipped * shrink[:, None] + tl.where(is_read, 0.0, sums)
        any_skipped |= tl.where(is_read, 0, 1)
        attended = (attended[0] * shrink[None, :], attended[1] * shrink[None, :])
        attended_zeros *= shrink[None, :]
        if is_read:
            found = (attended, attended_zeros)
            found = with_values(found, values, scales, zeros, weights, VALUE_BITS, WIDTH, ROWS)
            attended, attended_zeros = found
    return (greatest, total, attended, attended_zeros), skipped, any_skipped
