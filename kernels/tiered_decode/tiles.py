"""Tiles of slabs as operands of the tensor cores, and what happens to scores between two products.

Keys are the right operand of the first product, values (transposed) the left one of the second, so
that a lane's weights are already the operand it holds. Slabs lie in the order in which a lane owns
the operands (kernels/kv_quantise/layout.py); here that order is undone by reshapes alone, and
nothing moves between lanes. Of a product over channels or tokens the order is free: the small ones,
of zero points, take it as the accumulators have it.

Codes become float16 two at a time, by the bits of 1024 + code. Of the four bytes of a word the
middle ones have changed places: what one mask lays bare then are neighbours.
"""

import triton
import triton.language as tl

from kernels.interpreted import IS_INTERPRETED
from kernels.prefetch import prefetch_lines

# Weights times 2 to this, so that small ones stay normal in float16.
WEIGHT = tl.constexpr(4.0)
# Below every score, and yet a number: a row that sees no token yet has weights of zero, not NaN.
LEAST = tl.constexpr(-(2.0**127))
# High nibbles stay where they are: they are read as 16 times what they are.
SHIFTED_NIBBLE = tl.constexpr(16)

NIBBLES = tl.constexpr("""
    {
    .reg .b32 upper;
    shr.u32 upper, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, upper, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $2, $4, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $3, upper, 0x00f000f0, 0x64006400, 0xea;
    }
""")
SIGNED_NIBBLES = tl.constexpr("""
    {
    .reg .b32 upper, bias, sixteenth, shifted_bias;
    mov.b32 bias, 0x64086408;
    mov.b32 sixteenth, 0x2c002c00;
    mov.b32 shifted_bias, 0xd480d480;
    shr.u32 upper, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, upper, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $2, $4, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $3, upper, 0x00f000f0, 0x64006400, 0xea;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
    fma.rn.f16x2 $2, $2, sixteenth, shifted_bias;
    fma.rn.f16x2 $3, $3, sixteenth, shifted_bias;
    }
""")
BYTES = tl.constexpr("""
    prmt.b32 $0, $2, 0x64646464, 0x4240;
    prmt.b32 $1, $2, 0x64646464, 0x4341;
""")
SIGNED_BYTES = tl.constexpr("""
    {
    .reg .b32 bias;
    mov.b32 bias, 0x64806480;
    prmt.b32 $0, $2, 0x64646464, 0x4240;
    prmt.b32 $1, $2, 0x64646464, 0x4341;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
    }
""")


@triton.jit
def slab_at(place_ptr, num_slabs):
    """The slab or slabs that a table has there."""
    slab = tl.load(place_ptr)
    tl.device_assert((slab >= 0) & (slab < num_slabs), "a slab beyond the arena")
    return slab.to(tl.int64)


@triton.jit
def pair_of(first, place_ptr, num_slabs, GRAIN: tl.constexpr):
    """The slabs of a block of bytes, whose first one a table has there: neighbours, if of one
    grain."""
    if GRAIN == 2:
        tl.device_assert(first % 2 == 0, "a slab out of its place in a grain")
        slabs = first + tl.arange(0, 2)
    else:
        slabs = slab_at(place_ptr + tl.arange(0, 2), num_slabs)
    return slabs


@triton.jit
def in_order(packed):
    """What the masks do to the places of the bytes, [..., bytes]: the middle ones of each four."""
    bytes = packed.reshape(packed.numel // 4, 2, 2).permute(0, 2, 1)
    return bytes.reshape(packed.shape)


@triton.jit
def nibbles(packed, IS_SIGNED: tl.constexpr):
    """packed: bytes of words as they lie in a slab -> codes of the low nibbles, and of the high
    ones, in the order of the channels or tokens: code - 8 if signed, else 1024 + code and
    1024 + 16 code."""
    if IS_INTERPRETED:
        bytes = in_order(packed)
        low, high = (bytes & 15).to(tl.float16), (bytes >> 4).to(tl.float16)
        if IS_SIGNED:
            low, high = low - 8, high - 8
        else:
            low, high = low + 1024, high * SHIFTED_NIBBLE + 1024
    else:
        low, high = tl.inline_asm_elementwise(
            SIGNED_NIBBLES if IS_SIGNED else NIBBLES,
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def bytes_of(packed, IS_SIGNED: tl.constexpr):
    """As `nibbles`, of bytes: code - 128 if signed, else 1024 + code."""
    if IS_INTERPRETED:
        codes = in_order(packed).to(tl.float16)
        codes = codes - 128 if IS_SIGNED else codes + 1024
    else:
        codes = tl.inline_asm_elementwise(
            SIGNED_BYTES if IS_SIGNED else BYTES,
            "=r,=r,r",
            [packed],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    return codes


@triton.jit
def natural(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns in the order of accumulators, in that of the operands of a product of bytes."""
    split = tile.reshape(ROWS, COLUMNS // 32, 2, 2, 4, 2)
    return split.permute(0, 1, 3, 4, 2, 5).reshape(ROWS, COLUMNS)


@triton.jit
def accumulated(stored, CHUNKS: tl.constexpr, TILES: tl.constexpr):
    """Scales or zeros as a lane reads them, [chunks, 4 lanes, values], for accumulators."""
    split = stored.reshape(CHUNKS, 4, TILES, 2, 2, 2)
    return split.permute(0, 2, 4, 3, 1, 5).reshape(CHUNKS * TILES * 32)


@triton.jit
def by_tokens(weights, ROWS: tl.constexpr):
    """[rows, 64 tokens as accumulators have them] -> [64 tokens in order, rows]."""
    split = weights.reshape(ROWS, 2, 2, 2, 4, 2)
    return split.permute(1, 3, 4, 2, 5, 0).reshape(64, ROWS)


@triton.jit
def own_of_part(part, COUNT: tl.constexpr, OWN: tl.constexpr, PARTS: tl.constexpr):
    """Where COUNT values of a part lie, OWN of them side by side in each lane's own."""
    place = tl.arange(0, COUNT)
    if PARTS > 1:
        place = place // OWN * (OWN * PARTS) + part * OWN + place % OWN
    return place


@triton.jit
def twice(tile, COLUMNS: tl.constexpr):
    """[8, COLUMNS] -> [16, COLUMNS]: what `first_rows` undoes."""
    return tl.broadcast_to(tile[None, :, :], (2, 8, COLUMNS)).reshape(16, COLUMNS)


@triton.jit
def first_rows(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of 16 rows, which are twice the same where ROWS is 8."""
    if ROWS == 8:
        tile, _ = tile.reshape(2, 8, COLUMNS).permute(1, 2, 0).split()
    return tile


@triton.jit
def keys_of_nibbles(packed, HALF: tl.constexpr):
    """A slab -> the two halves of the channels, each [HALF, 64 tokens as accumulators have them],
    biased."""
    low, high = nibbles(packed, False)
    low = low.reshape(64, 4, HALF // 16, 4).permute(2, 1, 3, 0).reshape(HALF, 64)
    high = high.reshape(64, 4, HALF // 16, 4).permute(2, 1, 3, 0).reshape(HALF, 64)
    return low, high


@triton.jit
def keys_of_bytes(packed, HALF: tl.constexpr):
    """One half of the channels of two slabs -> [HALF, 64 tokens as accumulators have them],
    biased."""
    split = bytes_of(packed, False).reshape(2, 32, 4, HALF // 16, 4)
    return split.permute(3, 2, 4, 0, 1).reshape(HALF, 64)


@triton.jit
def values_of_nibbles(packed, HALF: tl.constexpr):
    """A slab -> the two halves of the channels, each [HALF, 64 tokens]."""
    low, high = nibbles(packed, True)
    low = low.reshape(HALF, 4, 4, 4).permute(0, 2, 1, 3).reshape(HALF, 64)
    high = high.reshape(HALF, 4, 4, 4).permute(0, 2, 1, 3).reshape(HALF, 64)
    return low, high


@triton.jit
def values_of_bytes(packed, HALF: tl.constexpr):
    """One half of the channels of two slabs -> [HALF, 64 tokens]."""
    split = bytes_of(packed, True).reshape(2, HALF // 16, 8, 4, 2, 2, 4)
    return split.permute(1, 4, 2, 0, 5, 3, 6).reshape(HALF, 64)


@triton.jit
def bias_and_zeros(query, zeros, BIAS: tl.constexpr, HALF: tl.constexpr):
    """What the bias of codes and the zero points add to each row's scores, [16, 8] alike."""
    bias = tl.dot(query, tl.full((HALF, 8), BIAS, tl.float16))
    return tl.dot(query, tl.broadcast_to(zeros[:, None], (HALF, 8)), bias)


@triton.jit
def nothing_attended(SIZE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """What grows from step to step: the greatest score times log2(e), the sums of weights of each
    lane, the halves of the channels of the weighed codes, part by part, and the weighed zeros."""
    greatest = tl.full((ROWS,), LEAST, tl.float32)
    total = tl.zeros((ROWS, 4), tl.float32)
    half = tl.zeros((SIZE // 2 // PARTS, ROWS), tl.float32)
    attended = (half, half) if PARTS == 1 else (half, half, half, half)
    return greatest, total, attended, tl.zeros((16, ROWS), tl.float32)


@triton.jit
def weighed(scores, factor, greatest, total, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One step of the softmax: (weights, shrink, greatest, total)."""
    new_greatest = tl.maximum(greatest, tl.max(scores, 1) * factor)
    shrink = tl.exp2(greatest - new_greatest)
    shape: tl.constexpr = (ROWS, COLUMNS)
    steep = tl.broadcast_to(factor[:, None], shape)
    shift = tl.broadcast_to((-new_greatest + WEIGHT)[:, None], shape)
    weights = tl.exp2(tl.fma(scores, steep, shift))
    # Each lane adds up its own columns.
    sums = tl.sum(tl.sum(weights.reshape(ROWS, COLUMNS // 8, 4, 2), 3), 1)
    return weights, shrink, new_greatest, total * shrink[:, None] + sums


@triton.jit
def power_of_two_above(x):
    """Of x >= 0: of 0, one."""
    floor = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(floor > 0, 2 * floor, 1.0)


@triton.jit
def place_of_row(row, head_stride, query_stride, QUERY_LEN: tl.constexpr):
    """The queries of a head follow each other."""
    return row // QUERY_LEN * head_stride + row % QUERY_LEN * query_stride


@triton.jit
def no_tiles():
    """A tuple to add to."""
    return ()


@triton.jit
def load_query(
    queries,
    rows,
    first_row,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
):
    """The channels in PARTS of WIDTH, each [16, WIDTH], its rows twice the same where ROWS is 8."""
    query_ptr, head_stride, query_stride = queries
    row, column = first_row + tl.arange(0, 16) % ROWS, tl.arange(0, WIDTH)
    starts = place_of_row(row, head_stride, query_stride, QUERY_LEN)
    places = starts[:, None] + column[None, :]
    is_row = tl.broadcast_to((row < rows)[:, None], (16, WIDTH))
    loaded = no_tiles()
    for part in tl.static_range(PARTS):
        loaded += (tl.load(query_ptr + part * WIDTH + places, mask=is_row, other=0.0),)
    return loaded


@triton.jit
def in_accumulators(tile, COLUMNS: tl.constexpr):
    """[16, COLUMNS] float32, as accumulators have them: added to a product of nothing, it is put
    there."""
    split = tile.reshape(16, COLUMNS // 32, 2, 4, 2, 2)
    tile = split.permute(0, 1, 4, 2, 3, 5).reshape(16, COLUMNS)
    nothing = tl.zeros((16, 16), tl.float16)
    return tl.dot(nothing, tl.zeros((16, COLUMNS), tl.float16), tile).to(tl.float16)


@triton.jit
def unit_query(query, WIDTH: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Halves in float16, as accumulators have them, and what each row was divided by to be at most
    1, [ROWS]: keys of any size then meet no overflow. Of several parts those of each in turn, and 8
    rows of what are twice the same: `twice` brings them back for no register."""
    exact = no_tiles()
    for nth in tl.static_range(2 * PARTS):
        exact += (query[nth].to(tl.float32),)
    greatest = tl.max(tl.abs(exact[0]), 1)
    for nth in tl.static_range(1, 2 * PARTS):
        greatest = tl.maximum(greatest, tl.max(tl.abs(exact[nth]), 1))
    unit = power_of_two_above(greatest)
    inverse = (1.0 / unit)[:, None]  # exact, of a power of two
    units = no_tiles()
    for nth in tl.static_range(2 * PARTS):
        each = in_accumulators(exact[nth % 2 * PARTS + nth // 2] * inverse, WIDTH)
        units += (each if PARTS == 1 else first_rows(each, 8, WIDTH),)
    if ROWS == 8:
        unit, _ = unit.reshape(2, 8).permute(1, 0).split()
    return units, unit


@triton.jit
def prefetch_slabs(
    arenas,
    key_slab,
    value_slab,
    head,
    kv_heads,
    KEY_GRAIN: tl.constexpr,
    VALUE_GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One head's part of two slabs, and of their metadata."""
    if not IS_INTERPRETED:
        key_slabs_ptr, value_slabs_ptr, key_meta_ptr, value_meta_ptr, _, _ = arenas
        key_part = key_slab.to(tl.int64) * kv_heads + head
        key_slot = (key_slab // KEY_GRAIN).to(tl.int64) * kv_heads + head
        value_part = value_slab.to(tl.int64) * kv_heads + head
        value_slot = (value_slab // VALUE_GRAIN).to(tl.int64) * kv_heads + head
        line = tl.arange(0, 32)
        for at in tl.static_range(0, SIZE, 128):
            prefetch_lines(key_slabs_ptr + key_part * (32 * SIZE) + line * SIZE + at)
        prefetch_lines(key_meta_ptr + key_slot * (2 * SIZE) + line * 64 % (2 * SIZE))
        for at in tl.static_range(0, SIZE, 128):
            prefetch_lines(value_slabs_ptr + value_part * (32 * SIZE) + line * SIZE + at)
        prefetch_lines(value_meta_ptr + value_slot * 128 + line * 64 % 128)
