"""A program quantises some channels of the keys, or some tokens of the values, of a block and head.
Of keys it holds the codes in the order in which they lie in a slab, and finds the token and the
channel of each; of values it finds the places of the codes."""

import triton
import triton.language as tl

from kernels.kernel import kernel, variants
from kernels.kv_quantise import reference
from kernels.kv_quantise.reference import (
    KEY_CONTRACT,
    SERVED_KEY_METAS,
    SERVED_VALUE_METAS,
    VALUE_CONTRACT,
)

MAX_ZERO = tl.constexpr(reference.MAX_ZERO)
MIN_SCALE = tl.constexpr(reference.MIN_SCALE)
MAX_SCALE = tl.constexpr(reference.MAX_SCALE)
# Added and subtracted, it rounds to the nearest integer, half to even.
ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def place_of_byte(byte):
    """Of the four bytes of a word the middle ones have changed places."""
    return byte % 2 * 2 + byte // 2


@triton.jit
def affine(bounds, BITS: tl.constexpr, FACTOR: tl.constexpr):
    """(scale / FACTOR, zero * FACTOR) in float16, and both as what they stand for."""
    LEVELS: tl.constexpr = 2**BITS - 1
    BIAS: tl.constexpr = 2 ** (BITS - 1)
    least, greatest = bounds
    levels = tl.full(least.shape, LEVELS, tl.float32)
    scale = tl.div_rn(greatest - least, levels)
    scale = tl.maximum(scale, tl.maximum(-least, greatest) * (1 / MAX_ZERO))
    scale = tl.minimum(tl.maximum(scale, MIN_SCALE), MAX_SCALE)
    kept = (scale * (1 / FACTOR)).to(tl.float16)
    scale = kept.to(tl.float32) * FACTOR
    kept_zero = ((tl.div_rn(least, scale) + BIAS) * FACTOR).to(tl.float16)
    return kept, kept_zero, scale, kept_zero.to(tl.float32) * (1 / FACTOR)


@triton.jit
def codes_of(exact, scale, zero, BITS: tl.constexpr):
    LEVELS: tl.constexpr = 2**BITS - 1
    BIAS: tl.constexpr = 2 ** (BITS - 1)
    steps = tl.div_rn(exact, tl.broadcast_to(scale, exact.shape))
    codes = steps - tl.broadcast_to(zero, exact.shape) + BIAS
    codes = tl.minimum(tl.maximum(codes, 0.0), LEVELS) + ROUNDER - ROUNDER
    return codes.to(tl.uint8)


@triton.jit
def slabs_at(table_ptr, nth, num_slabs, GRAIN: tl.constexpr):
    slab = tl.load(table_ptr + nth)
    tl.device_assert((slab >= 0) & (slab < num_slabs), "a slab beyond the arena")
    tl.device_assert(slab % GRAIN == nth % GRAIN, "a slab out of its place in a grain")
    return slab.to(tl.int64)


@triton.jit
def tokens_at(source, token, channel, GRAIN: tl.constexpr, SIZE: tl.constexpr):
    """Of slabs of bfloat16."""
    slabs_ptr, table_ptr, head, heads, slabs = source
    slab = slabs_at(table_ptr, token // 16, slabs, GRAIN)
    tokens_ptr = slabs_ptr.to(tl.pointer_type(tl.bfloat16))
    place = (slab * 16 + token % 16) * heads + head
    return tl.load(tokens_ptr + place * SIZE + channel).to(tl.float32)


@triton.jit
def place_in_meta(token, BITS: tl.constexpr, GRAIN: tl.constexpr):
    """Of the scale of one of a slot's tokens: lanes, 16s, a lane's own four."""
    SIXTEENS: tl.constexpr = 16 // BITS * GRAIN
    return token % 16 // 4 * (4 * SIXTEENS) + token // 16 % SIXTEENS * 4 + token % 4


@triton.jit
def place_of_value(channel, token, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Of the byte of a channel of the lower half and a token, in a part of a slab."""
    byte, lane = place_of_byte(token % 4), token % 16 // 4
    if BITS == 4:
        place = channel * 64 + lane * 16 + token // 16 * 4 + byte
    else:
        rows = channel // 16 * 8 + channel % 8
        place = rows * 64 + lane * 16 + channel // 8 % 2 * 8 + token // 16 % 2 * 4 + byte
    return place


@triton.jit
def values_at(
    source,
    channel,
    token,
    half: tl.constexpr,
    FROM_BITS: tl.constexpr,
    GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Of one half of the channels, [SIZE / 2, tokens] float32."""
    slabs_ptr, meta_ptr, table_ptr, head, heads, slabs = source
    if FROM_BITS == 16:
        place = half * (SIZE // 2) + channel
        exact = tokens_at((slabs_ptr, table_ptr, head, heads, slabs), token, place, GRAIN, SIZE)
    else:
        # On their way to 4 bits: a block of those is one slab, and so is a grain.
        slab = slabs_at(table_ptr, token // 32, slabs, 1) * heads + head
        place = half * (16 * SIZE) + place_of_value(channel, token, 8, SIZE)
        codes = tl.load(slabs_ptr + slab * (32 * SIZE) + place).to(tl.float32)
        source_meta = meta_ptr + slab * 128 + place_in_meta(token, 8, 1)
        scale = tl.load(source_meta).to(tl.float32)
        exact = (codes - 128 + tl.load(source_meta + 64).to(tl.float32)) * scale
    return exact


@kernel(contract=KEY_CONTRACT, variants=variants({}, SERVED_KEY_METAS, aligned=[True]))
def kv_quantise_keys_kernel(
    slabs_ptr,
    meta_ptr,
    sources_ptr,
    targets_ptr,
    num_slots,
    num_heads,
    FROM_BITS: tl.constexpr,
    BITS: tl.constexpr,
    GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_slabs = num_slots * GRAIN
    HALF: tl.constexpr = SIZE // 2
    PART: tl.constexpr = 32 * SIZE
    sources_ptr += block * (FROM_BITS // 4)
    targets_ptr += block * (BITS // 4)
    row = tl.arange(0, 64)[:, None]
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    lane, own = row % 8 // 2, row % 2
    token = row // 32 * 32 + row // 8 % 2 * 16 + lane * 4 + row // 16 % 2 * 2 + own
    in_lane = column % (HALF // 4)
    of_four = column // (HALF // 4) * 4 + place_of_byte(in_lane % 4)
    channel = in_lane // 4 * 16 + of_four
    in_meta = column - in_lane % 4 + place_of_byte(in_lane % 4)
    for half in tl.static_range(2):
        if FROM_BITS == 16:
            place = half * HALF + channel
            source = (slabs_ptr, sources_ptr, head, num_heads, num_slabs)
            exact = tokens_at(source, token, place, GRAIN, SIZE)
        else:
            # On their way to 4 bits: a block of those is one slab, and so is a grain.
            slab = slabs_at(sources_ptr, row // 32, num_slabs, 1) * num_heads + head
            place = half * (PART // 2) + row % 32 * HALF + column
            codes = tl.load(slabs_ptr + slab * PART + place).to(tl.float32)
            first = slabs_at(sources_ptr, 0, num_slabs, 1) * num_heads + head
            source_meta = meta_ptr + first * (2 * SIZE) + half * HALF + in_meta
            scale = tl.load(source_meta).to(tl.float32)
            zero = tl.load(source_meta + SIZE).to(tl.float32)
            exact = (codes - 128 + zero) * scale
        bounds = tl.min(exact, 0, keep_dims=True), tl.max(exact, 0, keep_dims=True)
        # High nibbles are those of the second half, and are read as 16 times what they are.
        kept, kept_zero, scale, zero = affine(bounds, BITS, 16 if BITS + half == 5 else 1)
        codes = codes_of(exact, scale, zero, BITS)
        if BITS == 4:
            if half == 0:
                low = codes
            else:
                slab = slabs_at(targets_ptr, 0, num_slabs, 1) * num_heads + head
                tl.store(slabs_ptr + slab * PART + row * HALF + column, low | codes << 4)
        else:
            slab = slabs_at(targets_ptr, row // 32, num_slabs, GRAIN) * num_heads + head
            place = half * (PART // 2) + row % 32 * HALF + column
            tl.store(slabs_ptr + slab * PART + place, codes)
        for nth in tl.static_range(BITS // 4 // GRAIN):
            slot = slabs_at(targets_ptr, nth * GRAIN, num_slabs, GRAIN) // GRAIN
            target_meta = meta_ptr + (slot * num_heads + head) * (2 * SIZE)
            target_meta += half * HALF + in_meta
            tl.store(target_meta, kept)
            tl.store(target_meta + SIZE, kept_zero)


@kernel(contract=VALUE_CONTRACT, variants=variants({}, SERVED_VALUE_METAS, aligned=[True]))
def kv_quantise_values_kernel(
    slabs_ptr,
    meta_ptr,
    sources_ptr,
    targets_ptr,
    num_slots,
    num_heads,
    FROM_BITS: tl.constexpr,
    BITS: tl.constexpr,
    GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_slabs = num_slots * GRAIN
    HALF: tl.constexpr = SIZE // 2
    sources_ptr += block * (FROM_BITS // 4)
    targets_ptr += block * (BITS // 4)
    channel = tl.arange(0, HALF)[:, None]
    token = tl.program_id(2) * TILE + tl.arange(0, TILE)[None, :]
    source = (slabs_ptr, meta_ptr, sources_ptr, head, num_heads, num_slabs)
    low = values_at(source, channel, token, 0, FROM_BITS, GRAIN, SIZE)
    high = values_at(source, channel, token, 1, FROM_BITS, GRAIN, SIZE)
    least = tl.minimum(tl.min(low, 0, keep_dims=True), tl.min(high, 0, keep_dims=True))
    greatest = tl.maximum(tl.max(low, 0, keep_dims=True), tl.max(high, 0, keep_dims=True))
    kept, kept_zero, scale, zero = affine((least, greatest), BITS, 1)
    low, high = codes_of(low, scale, zero, BITS), codes_of(high, scale, zero, BITS)
    slab = slabs_at(targets_ptr, token // (64 // (BITS // 4)), num_slabs, GRAIN)
    stored = slabs_ptr + (slab * num_heads + head) * (32 * SIZE)
    stored += place_of_value(channel, token, BITS, SIZE)
    if BITS == 4:
        tl.store(stored, low | high << 4)
    else:
        tl.store(stored, low)
        tl.store(stored + 16 * SIZE, high)
    stored_meta = meta_ptr + (slab // GRAIN * num_heads + head) * 128
    stored_meta += place_in_meta(token, BITS, GRAIN)
    tl.store(stored_meta, kept)
    tl.store(stored_meta + 64, kept_zero)
    if BITS == 8 and GRAIN == 1:
        # What has no token is zero, as if it had been stored as a whole.
        tl.store(stored_meta + 32, tl.zeros(kept.shape, tl.float16))
        tl.store(stored_meta + 96, tl.zeros(kept.shape, tl.float16))
