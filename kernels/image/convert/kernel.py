"""A pixel has three bytes, which no wide load divides; sixteen pixels have twelve words.

So a thread loads three times 16 bytes and takes four pixels out of three words, in registers: no
byte is loaded twice, and all stores are 16 bytes wide.
"""

import triton
import triton.language as tl

from kernels.image.convert.api import COLOUR_METAS, GREY_METAS
from kernels.image.convert.reference import COLOUR_CONTRACT, GREY_CONTRACT
from kernels.kernel import kernel, variants

PIXELS = tl.constexpr(16)  # of a thread


@triton.jit
def grey_of(blue, green, red):
    return (9798 * red + 19235 * green + 3735 * blue + 16384) >> 15


@triton.jit
def recoloured(blue, green, red, TO_YCRCB: tl.constexpr):
    """The three bytes of a pixel, in the order in which they are stored."""
    if TO_YCRCB:
        luma = (4899 * red + 9617 * green + 1868 * blue + 8192) >> 14
        cr = (11682 * (red - luma) + 2105344) >> 14
        cb = (9241 * (blue - luma) + 2105344) >> 14
        first, second = luma, tl.minimum(tl.maximum(cr, 0), 255)
        third = tl.minimum(tl.maximum(cb, 0), 255)
    else:
        first, second, third = red, green, blue
    return first, second, third


@triton.jit
def byte(words, INDEX: tl.constexpr):
    return ((words >> (8 * INDEX)) & 255).to(tl.int32)


@triton.jit
def word(first, second, third, fourth):
    """Four bytes in int32 -> uint32, the first one lowest."""
    return (first | (second << 8) | (third << 16) | (fourth << 24)).to(tl.uint32, bitcast=True)


@triton.jit
def columns_of(words, BLOCK: tl.constexpr):
    """[BLOCK, 4] -> its four columns."""
    even, odd = tl.split(tl.reshape(words, (BLOCK, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def of_columns(first, second, third, fourth, BLOCK: tl.constexpr):
    """Its inverse."""
    both = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(both, (BLOCK, 4))


@triton.jit
def four_greys(x, y, z):
    """Of four pixels in three words, as one word."""
    return word(
        grey_of(byte(x, 0), byte(x, 1), byte(x, 2)),
        grey_of(byte(x, 3), byte(y, 0), byte(y, 1)),
        grey_of(byte(y, 2), byte(y, 3), byte(z, 0)),
        grey_of(byte(z, 1), byte(z, 2), byte(z, 3)),
    )


@triton.jit
def four_recoloured(x, y, z, TO_YCRCB: tl.constexpr):
    """Four pixels in three words, likewise stored."""
    a0, a1, a2 = recoloured(byte(x, 0), byte(x, 1), byte(x, 2), TO_YCRCB)
    b0, b1, b2 = recoloured(byte(x, 3), byte(y, 0), byte(y, 1), TO_YCRCB)
    c0, c1, c2 = recoloured(byte(y, 2), byte(y, 3), byte(z, 0), TO_YCRCB)
    d0, d1, d2 = recoloured(byte(z, 1), byte(z, 2), byte(z, 3), TO_YCRCB)
    return word(a0, a1, a2, b0), word(b1, b2, c0, c1), word(c2, d0, d1, d2)


@kernel(contract=GREY_CONTRACT, variants=variants({}, GREY_METAS, aligned=(True,)))
def grey_kernel(pages_ptr, out_ptr, pixels, BLOCK: tl.constexpr):
    groups = pixels // PIXELS
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    mask = group < groups
    quarter = tl.arange(0, 4)[None, :]
    words = pages_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + group * 12 + quarter
    x0, x1, x2, x3 = columns_of(tl.load(words, mask=mask), BLOCK)
    x4, x5, x6, x7 = columns_of(tl.load(words + 4, mask=mask), BLOCK)
    x8, x9, x10, x11 = columns_of(tl.load(words + 8, mask=mask), BLOCK)
    greys = of_columns(
        four_greys(x0, x1, x2),
        four_greys(x3, x4, x5),
        four_greys(x6, x7, x8),
        four_greys(x9, x10, x11),
        BLOCK,
    )
    stored = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + group * 4 + quarter
    tl.store(stored, greys, mask=mask)
    if tl.program_id(0) == 0:  # the pixels that fill no group
        pixel = groups.to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
        rest = pixel < pixels
        blue = tl.load(pages_ptr + pixel * 3, mask=rest).to(tl.int32)
        green = tl.load(pages_ptr + pixel * 3 + 1, mask=rest).to(tl.int32)
        red = tl.load(pages_ptr + pixel * 3 + 2, mask=rest).to(tl.int32)
        tl.store(out_ptr + pixel, grey_of(blue, green, red).to(tl.uint8), mask=rest)


@kernel(contract=COLOUR_CONTRACT, variants=variants({}, COLOUR_METAS, aligned=(True,)))
def colour_kernel(pages_ptr, out_ptr, pixels, TO_YCRCB: tl.constexpr, BLOCK: tl.constexpr):
    groups = pixels // PIXELS
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    mask = group < groups
    at = group * 12 + tl.arange(0, 4)[None, :]
    words = pages_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + at
    x0, x1, x2, x3 = columns_of(tl.load(words, mask=mask), BLOCK)
    x4, x5, x6, x7 = columns_of(tl.load(words + 4, mask=mask), BLOCK)
    x8, x9, x10, x11 = columns_of(tl.load(words + 8, mask=mask), BLOCK)
    x0, x1, x2 = four_recoloured(x0, x1, x2, TO_YCRCB)
    x3, x4, x5 = four_recoloured(x3, x4, x5, TO_YCRCB)
    x6, x7, x8 = four_recoloured(x6, x7, x8, TO_YCRCB)
    x9, x10, x11 = four_recoloured(x9, x10, x11, TO_YCRCB)
    stored = out_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + at
    tl.store(stored, of_columns(x0, x1, x2, x3, BLOCK), mask=mask)
    tl.store(stored + 4, of_columns(x4, x5, x6, x7, BLOCK), mask=mask)
    tl.store(stored + 8, of_columns(x8, x9, x10, x11, BLOCK), mask=mask)
    if tl.program_id(0) == 0:  # the pixels that fill no group
        pixel = groups.to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
        rest = pixel < pixels
        blue = tl.load(pages_ptr + pixel * 3, mask=rest).to(tl.int32)
        green = tl.load(pages_ptr + pixel * 3 + 1, mask=rest).to(tl.int32)
        red = tl.load(pages_ptr + pixel * 3 + 2, mask=rest).to(tl.int32)
        first, second, third = recoloured(blue, green, red, TO_YCRCB)
        tl.store(out_ptr + pixel * 3, first.to(tl.uint8), mask=rest)
        tl.store(out_ptr + pixel * 3 + 1, second.to(tl.uint8), mask=rest)
        tl.store(out_ptr + pixel * 3 + 2, third.to(tl.uint8), mask=rest)
