"""Four source pixels for each target pixel, its three planes stored at once.

The two pixels of a row lie in 6 bytes. Where the source is whole words, three loads of 4 bytes take
them out, in place of six of one byte: what limits this kernel is the number of its loads. The taps
of a column are looked up once for ROWS rows.
"""

import triton
import triton.language as tl

from kernels.image.resize.api import METAS
from kernels.image.resize.reference import CONTRACT
from kernels.kernel import kernel, variants


@triton.jit
def two_pixels(pages_ptr, row, start, next_pixel, BY_WORDS: tl.constexpr):
    """uint32 blue, green, red, next blue; and next green, next red: those at row + start, bytes.

    row: scalar int64; start: the columns' int32. The third word is loaded where it holds the last
    of the 6 bytes, and so never lies beyond the source.
    """
    if BY_WORDS:
        words = pages_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + (row >> 2)
        first_byte = start + (row & 3).to(tl.int32)
        words += first_byte >> 2
        skipped = first_byte & 3
        shift = (skipped << 3).to(tl.uint64)
        one = tl.load(words).to(tl.uint64)
        two = tl.load(words + 1).to(tl.uint64)
        three = tl.load(words + 2, mask=skipped == 3, other=0).to(tl.uint64)
        low = (((two << 32) | one) >> shift).to(tl.uint32)
        high = (((three << 32) | two) >> shift).to(tl.uint32)
    else:
        here = pages_ptr + row + start
        low = tl.load(here).to(tl.uint32) | (tl.load(here + 1).to(tl.uint32) << 8)
        low |= tl.load(here + 2).to(tl.uint32) << 16
        low |= tl.load(here + next_pixel).to(tl.uint32) << 24
        high = tl.load(here + next_pixel + 1).to(tl.uint32)
        high |= tl.load(here + next_pixel + 2).to(tl.uint32) << 8
    return low, high


@triton.jit
def level(word, INDEX: tl.constexpr, RAISED: tl.constexpr):
    """A byte in float32, or, raised, 2^23 + the byte, whose last bits it is.

    A GPU converts a quarter as fast as it does anything else; raising is two cheap steps.
    """
    byte = (word >> (8 * INDEX)) & 255
    return (byte | 0x4B000000).to(tl.float32, bitcast=True) if RAISED else byte.to(tl.float32)


@triton.jit
def blended(a, b, c, d, right, down, RAISED: tl.constexpr):
    """Of four levels, a beside b above c beside d. The differences of raised ones are exact."""
    across = b - a
    above = tl.fma(right, across, a - 8388608.0 if RAISED else a)
    step = tl.fma(right, (d - c) - across, c - a)
    return tl.fma(down, step, above)


@triton.jit
def channel(
    upper,
    next_upper,
    lower,
    next_lower,
    INDEX: tl.constexpr,
    NEXT: tl.constexpr,
    right,
    down,
    RAISED: tl.constexpr,
):
    a, b = level(upper, INDEX, RAISED), level(next_upper, NEXT, RAISED)
    c, d = level(lower, INDEX, RAISED), level(next_lower, NEXT, RAISED)
    return blended(a, b, c, d, right, down, RAISED)


@kernel(
    contract=CONTRACT,
    # The width is what a model asks for, mostly a multiple of 16: of those code is a tenth faster.
    variants=variants({"out": CONTRACT.tensors["out"].dtypes}, METAS),
)
def resize_normalise_kernel(
    pages_ptr,
    rows_ptr,
    row_weights_ptr,
    columns_ptr,
    column_weights_ptr,
    out_ptr,
    source_height,
    source_width,
    height,
    width,
    red_scale,
    green_scale,
    blue_scale,
    red_offset,
    green_offset,
    blue_offset,
    BY_WORDS: tl.constexpr,
    RAISED: tl.constexpr,  # of the three channels, how many
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page = tl.program_id(0).to(tl.int64)
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = x < width
    start = 3 * tl.load(columns_ptr + x, mask=is_column, other=0)
    right = tl.load(column_weights_ptr + x, mask=is_column, other=0.0)
    # A tap is never the last of several pixels: the next one is there, or there is only one.
    row_bytes = 3 * source_width
    next_pixel = 3 * tl.minimum(source_width - 1, 1)
    next_row = (row_bytes * tl.minimum(source_height - 1, 1)).to(tl.int64)
    source = page * source_height * row_bytes
    plane = height.to(tl.int64) * width
    target = out_ptr + page * 3 * plane + x
    for row in tl.static_range(ROWS):
        y = tl.program_id(2) * ROWS + row
        mask = is_column & (tl.full((BLOCK,), 0, tl.int32) + y < height)
        tap = tl.minimum(y, height - 1)
        above = tl.load(rows_ptr + tap)
        down = tl.load(row_weights_ptr + tap)
        upper = source + above.to(tl.int64) * row_bytes
        a, b = two_pixels(pages_ptr, upper, start, next_pixel, BY_WORDS)
        c, d = two_pixels(pages_ptr, upper + next_row, start, next_pixel, BY_WORDS)
        blue = channel(a, a, c, c, 0, 3, right, down, RAISED > 0)
        green = channel(a, b, c, d, 1, 0, right, down, RAISED > 1)
        red = channel(a, b, c, d, 2, 1, right, down, RAISED > 2)
        stored = target + y.to(tl.int64) * width
        dtype = out_ptr.dtype.element_ty
        tl.store(stored, tl.fma(red, red_scale, red_offset).to(dtype), mask=mask)
        tl.store(stored + plane, tl.fma(green, green_scale, green_offset).to(dtype), mask=mask)
        tl.store(stored + 2 * plane, tl.fma(blue, blue_scale, blue_offset).to(dtype), mask=mask)
