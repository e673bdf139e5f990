"""Running sums: down each column as the rows go by, then along each row over neighbouring lanes.

A program has ROWS rows and as many columns as its lanes have, four neighbours each; the first ones
are spent to fill the window. Sums of levels and of squares are exact int32. The threshold is
guessed in float32; where a pixel lies so near that the guess may err, which is rare, the whole row
of the program is decided in the float64 of the reference.

`sauvola_kernel` has the window as a constexpr: a column's sum enters the sums of its lane, and the
lanes of a window are added by halves. `sauvola_any_kernel` takes any window: beside each column it
sums the one that leaves the window, and a prefix sum of the differences is the sum of the window.
"""

import triton
import triton.language as tl

from kernels.image.binarize.api import ANY_METAS, METAS
from kernels.image.binarize.reference import ANY_CONTRACT, CONTRACT
from kernels.kernel import kernel, variants


@triton.jit
def constants(count, permille):
    """k, and of -T = levels * (flat + steep * sqrt(spread)): flat, steep; and T's largest error.

    spread = n squares - levels^2 is off by less than 3 * 2^-24 n squares, so the deviation by less
    than 0.108 and T by less than k * 0.108 / 128 of the mean; 2^-20 is more than all roundings.
    """
    k = permille.to(tl.float64) / 1000
    flat = ((k - 1) / count).to(tl.float32)
    steep = (-k / (count * count * 128)).to(tl.float32)
    error = ((k * 0.0009765625 + 9.5367431640625e-7) / count).to(tl.float32)
    return k, flat, steep, error


@triton.jit
def guessed(pixel, levels, squares, minus_count, flat, steep, error):
    """How far the pixel is above its threshold, in float32, and whether the sign may be wrong."""
    wide = levels.to(tl.float32)
    spread = tl.abs(tl.fma(squares.to(tl.float32), minus_count, wide * wide))
    above = tl.fma(wide, tl.fma(tl.sqrt(spread), steep, flat), pixel.to(tl.float32))
    return above, tl.abs(above) < wide * error


@triton.jit
def known(pixel, levels, squares, count, k):
    """255 above the threshold, else 0: in float64, each step as in the reference."""
    mean = levels.to(tl.float64) / count
    variance = squares.to(tl.float64) / count - mean * mean
    deviation = tl.sqrt(tl.maximum(variance, 0.0))
    return tl.where(pixel.to(tl.float64) > mean * (1 + k * (deviation / 128 - 1)), 255, 0)


@triton.jit
def four_decided(p, s, q, is_stored, count, permille):
    """Of pixels p with the sums s of levels and q of squares: 255 or 0."""
    k, flat, steep, error = constants(count, permille)
    minus_count = (-count).to(tl.float32)
    a0, near0 = guessed(p[0], s[0], q[0], minus_count, flat, steep, error)
    a1, near1 = guessed(p[1], s[1], q[1], minus_count, flat, steep, error)
    a2, near2 = guessed(p[2], s[2], q[2], minus_count, flat, steep, error)
    a3, near3 = guessed(p[3], s[3], q[3], minus_count, flat, steep, error)
    v0, v1 = tl.where(a0 > 0, 255, 0), tl.where(a1 > 0, 255, 0)
    v2, v3 = tl.where(a2 > 0, 255, 0), tl.where(a3 > 0, 255, 0)
    near = (near0 | near1 | near2 | near3) & is_stored
    if tl.max(near.to(tl.int32), 0) > 0:
        v0, v1 = known(p[0], s[0], q[0], count, k), known(p[1], s[1], q[1], count, k)
        v2, v3 = known(p[2], s[2], q[2], count, k), known(p[3], s[3], q[3], count, k)
    return v0, v1, v2, v3


@triton.jit
def four(row_ptr, x, mask, IS_INNER: tl.constexpr):
    """Four columns of a row, int32; inner ones are neighbours, and all there."""
    if IS_INNER:
        here = row_ptr + x[0]
        p0, p1 = tl.load(here), tl.load(here + 1)
        p2, p3 = tl.load(here + 2), tl.load(here + 3)
    else:
        p0 = tl.load(row_ptr + x[0], mask=mask[0], other=0)
        p1 = tl.load(row_ptr + x[1], mask=mask[1], other=0)
        p2 = tl.load(row_ptr + x[2], mask=mask[2], other=0)
        p3 = tl.load(row_ptr + x[3], mask=mask[3], other=0)
    return p0.to(tl.int32), p1.to(tl.int32), p2.to(tl.int32), p3.to(tl.int32)


@triton.jit
def lanes_before(x, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """What the lane NUM before has; the first lanes, which have none there, get what is wrong."""
    return tl.gather(x, tl.maximum(tl.arange(0, BLOCK) - NUM, 0), 0)


@triton.jit
def window_sums(c0, c1, c2, c3, QUADS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over each column and the 4 * QUADS before it, of columns c in fours to a lane."""
    c1 += c0
    c2 += c1
    c3 += c2
    power = c3
    before = tl.zeros_like(c0)
    for bit in tl.static_range(5):
        if (QUADS >> bit) & 1:
            before += lanes_before(power, 1 + QUADS % (1 << bit), BLOCK)
        if QUADS >> (bit + 1) > 0:
            power += lanes_before(power, 1 << bit, BLOCK)
    s1 = before + c1 - lanes_before(c0, QUADS, BLOCK)
    s2 = before + c2 - lanes_before(c1, QUADS, BLOCK)
    s3 = before + c3 - lanes_before(c2, QUADS, BLOCK)
    return before + c0, s1, s2, s3


@triton.jit
def segment(
    page_ptr, starts_ptr, out_ptr, entering, x, mask, top, bottom, width, permille,
    QUADS: tl.constexpr, BLOCK: tl.constexpr, IS_INNER: tl.constexpr,
):  # fmt: skip
    """Rows from top to bottom. entering, x: columns that enter, and that are stored where `mask`
    says."""
    WINDOW: tl.constexpr = 4 * QUADS + 1
    count = tl.full((), WINDOW * WINDOW, tl.float64)
    is_stored = tl.arange(0, BLOCK) >= QUADS
    everywhere = tl.arange(0, BLOCK) >= 0
    everywhere = (everywhere, everywhere, everywhere, everywhere)
    s0 = tl.zeros((BLOCK,), tl.int32)
    s1, s2, s3, q0, q1, q2, q3 = s0, s0, s0, s0, s0, s0, s0
    for row in range(top, top + WINDOW):
        row_ptr = page_ptr + tl.load(starts_ptr + row)
        a0, a1, a2, a3 = four(row_ptr, entering, everywhere, IS_INNER)
        s0, s1, s2, s3 = s0 + a0, s1 + a1, s2 + a2, s3 + a3
        q0, q1, q2, q3 = q0 + a0 * a0, q1 + a1 * a1, q2 + a2 * a2, q3 + a3 * a3
    row = tl.cast(top, tl.int64) * width
    for y in range(top, bottom):
        # What the next row needs is on its way while this one is decided.
        next_ptr = page_ptr + tl.load(starts_ptr + y + WINDOW)
        a0, a1, a2, a3 = four(next_ptr, entering, everywhere, IS_INNER)
        b0, b1, b2, b3 = four(page_ptr + tl.load(starts_ptr + y), entering, everywhere, IS_INNER)
        pixels = four(page_ptr + row, x, mask, IS_INNER)
        levels = window_sums(s0, s1, s2, s3, QUADS, BLOCK)
        squares = window_sums(q0, q1, q2, q3, QUADS, BLOCK)
        value = four_decided(pixels, levels, squares, is_stored, count, permille)
        stored = out_ptr + row + x[0]
        tl.store(stored, value[0].to(tl.uint8), mask=mask[0])
        tl.store(stored + 1, value[1].to(tl.uint8), mask=mask[1])
        tl.store(stored + 2, value[2].to(tl.uint8), mask=mask[2])
        tl.store(stored + 3, value[3].to(tl.uint8), mask=mask[3])
        row += width
        s0, s1, s2, s3 = s0 + a0 - b0, s1 + a1 - b1, s2 + a2 - b2, s3 + a3 - b3
        q0, q1 = q0 + a0 * a0 - b0 * b0, q1 + a1 * a1 - b1 * b1
        q2, q3 = q2 + a2 * a2 - b2 * b2, q3 + a3 * a3 - b3 * b3


@triton.jit
def four_columns(first):
    return first, first + 1, first + 2, first + 3


@kernel(contract=CONTRACT, variants=variants({}, METAS, aligned=(True,)))
def sauvola_kernel(
    pages_ptr,
    starts_ptr,
    columns_ptr,
    out_ptr,
    height,
    width,
    padded_width,
    permille,
    QUADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page = tl.program_id(0).to(tl.int64) * height * width
    page_ptr, out_ptr = pages_ptr + page, out_ptr + page
    start = tl.program_id(1) * (4 * (BLOCK - QUADS))
    padded = start + 4 * tl.arange(0, BLOCK)  # columns counted from the start of the padded row
    x = four_columns(padded - 4 * QUADS)
    is_stored = tl.arange(0, BLOCK) >= QUADS
    top = tl.program_id(2) * ROWS
    bottom = tl.minimum(top + ROWS, height)
    if (start >= 4 * QUADS) & (start + 4 * BLOCK <= width + 2 * QUADS):
        mask = (is_stored, is_stored, is_stored, is_stored)
        entering = four_columns(padded - 2 * QUADS)
        segment(
            page_ptr, starts_ptr, out_ptr, entering, x, mask, top, bottom, width, permille,
            QUADS, BLOCK, True,
        )  # fmt: skip
    else:
        mask = (
            is_stored & (x[0] < width),
            is_stored & (x[1] < width),
            is_stored & (x[2] < width),
            is_stored & (x[3] < width),
        )
        end = padded_width - 1
        entering = (
            tl.load(columns_ptr + tl.minimum(padded, end)),
            tl.load(columns_ptr + tl.minimum(padded + 1, end)),
            tl.load(columns_ptr + tl.minimum(padded + 2, end)),
            tl.load(columns_ptr + tl.minimum(padded + 3, end)),
        )
        segment(
            page_ptr, starts_ptr, out_ptr, entering, x, mask, top, bottom, width, permille,
            QUADS, BLOCK, False,
        )  # fmt: skip


@triton.jit
def difference(row_ptr, entering, leaving, has_leaving):
    """Of the levels and of the squares of one row: what enters the window and what leaves it."""
    plus = tl.load(row_ptr + entering).to(tl.int32)
    minus = tl.load(row_ptr + leaving, mask=has_leaving, other=0).to(tl.int32)
    return plus - minus, plus * plus - minus * minus


@kernel(contract=ANY_CONTRACT, variants=variants({}, ANY_METAS, aligned=(True,)))
def sauvola_any_kernel(
    pages_ptr,
    starts_ptr,
    columns_ptr,
    out_ptr,
    height,
    width,
    padded_width,
    window,
    permille,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page = tl.program_id(0).to(tl.int64) * height * width
    page_ptr = pages_ptr + page
    place = tl.arange(0, BLOCK)
    padded = tl.program_id(1) * (BLOCK - window + 1) + place  # column of the padded row
    entering = tl.load(columns_ptr + tl.minimum(padded, padded_width - 1))
    has_leaving = place >= window
    leaving = tl.minimum(padded - window, padded_width - 1)
    leaving = tl.load(columns_ptr + leaving, mask=has_leaving, other=0)
    x = padded - window + 1
    is_stored = (place >= window - 1) & (x < width)
    count = (window * window).to(tl.float64)
    k, flat, steep, error = constants(count, permille)
    levels = tl.zeros((BLOCK,), tl.int32)
    squares = levels
    top = tl.program_id(2) * ROWS
    for row in range(top, top + window):
        row_ptr = page_ptr + tl.load(starts_ptr + row)
        level, square = difference(row_ptr, entering, leaving, has_leaving)
        levels, squares = levels + level, squares + square
    for y in range(top, tl.minimum(top + ROWS, height)):
        s, q = tl.cumsum(levels, 0), tl.cumsum(squares, 0)
        middle = tl.cast(y, tl.int64) * width + x
        pixel = tl.load(page_ptr + middle, mask=is_stored, other=0).to(tl.int32)
        above, near = guessed(pixel, s, q, (-count).to(tl.float32), flat, steep, error)
        value = tl.where(above > 0, 255, 0)
        if tl.max((near & is_stored).to(tl.int32), 0) > 0:
            value = known(pixel, s, q, count, k)
        tl.store(out_ptr + page + middle, value.to(tl.uint8), mask=is_stored)
        row_ptr = page_ptr + tl.load(starts_ptr + y + window)
        level, square = difference(row_ptr, entering, leaving, has_leaving)
        levels, squares = levels + level, squares + square
        row_ptr = page_ptr + tl.load(starts_ptr + y)
        level, square = difference(row_ptr, entering, leaving, has_leaving)
        levels, squares = levels - level, squares - square
