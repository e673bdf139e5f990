"""The ink of strips is counted once; every angle then adds the strips, each moved by whole rows.

Strips lie row beside row, so that a program reads neighbouring bytes at any angle, and adds without
atomics.
"""

import triton
import triton.language as tl

from kernels.image.deskew.api import PROFILES_METAS, STRIPS_METAS, TURN_METAS
from kernels.image.deskew.reference import (
    PROFILES_CONTRACT,
    STRIP,
    STRIPS_CONTRACT,
    TURN_CONTRACT,
)
from kernels.kernel import kernel, variants

COLUMNS = tl.constexpr(STRIP)


@kernel(contract=STRIPS_CONTRACT, variants=variants({}, STRIPS_METAS, aligned=(True,)))
def strips_kernel(
    pages_ptr,
    out_ptr,
    height,
    width,
    num_strips,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK: strips."""
    page = tl.program_id(0).to(tl.int64)
    y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x = tl.program_id(2) * (BLOCK * COLUMNS) + tl.arange(0, BLOCK * COLUMNS)
    mask = (y < height)[:, None] & (x < width)[None, :]
    at = (page * height + y)[:, None] * width + x[None, :]
    ink = (tl.load(pages_ptr + at, mask=mask, other=255) < 128).to(tl.int32)
    counts = tl.sum(tl.reshape(ink, (ROWS, BLOCK, COLUMNS)), 2)
    strip = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = (y < height)[:, None] & (strip < num_strips)[None, :]
    stored = out_ptr + (page * num_strips + strip)[None, :] * height + y[:, None]
    tl.store(stored, counts.to(tl.uint8), mask=mask)


@kernel(contract=PROFILES_CONTRACT, variants=variants({}, PROFILES_METAS, aligned=(True,)))
def profiles_kernel(
    strips_ptr,
    slopes_ptr,
    out_ptr,
    num_strips,
    num_angles,
    height,
    width,
    BLOCK: tl.constexpr,
):
    page = tl.program_id(0).to(tl.int64)
    angle = page * num_angles + tl.program_id(1)
    y = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slope = tl.load(slopes_ptr + angle)
    middle = (width - 1) * 0.5
    ink = tl.zeros((BLOCK,), tl.int32)
    for strip in range(num_strips):
        right = tl.cast(strip * COLUMNS, tl.float32) + (COLUMNS - 1) / 2 - middle
        source = y + tl.floor(slope * right + 0.5).to(tl.int32)
        strip_ptr = strips_ptr + (page * num_strips + strip) * height
        inside = (source >= 0) & (source < height)
        ink += tl.load(strip_ptr + source, mask=inside, other=0).to(tl.int32)
    tl.store(out_ptr + angle * height + y, ink, mask=y < height)


@triton.jit
def level(page_ptr, row, column, height, width, mask):
    inside = mask & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    pointers = page_ptr + row.to(tl.int64) * width + column
    return tl.load(pointers, mask=inside, other=255).to(tl.float32)


@kernel(contract=TURN_CONTRACT, variants=variants({}, TURN_METAS, aligned=(True,)))
def turn_kernel(
    pages_ptr,
    rotation_ptr,
    out_ptr,
    height,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page = tl.program_id(0).to(tl.int64)
    page_ptr = pages_ptr + page * height * width
    cosine = tl.load(rotation_ptr + page * 2)
    sine = tl.load(rotation_ptr + page * 2 + 1)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < height) & (column < width)
    middle_x, middle_y = (width - 1) * 0.5, (height - 1) * 0.5
    y, x = row.to(tl.float32) - middle_y, column.to(tl.float32) - middle_x
    source_x = (x * cosine + y * sine) + middle_x
    source_y = (y * cosine - x * sine) + middle_y
    left, top = tl.floor(source_x), tl.floor(source_y)
    right, down = source_x - left, source_y - top
    left, top = left.to(tl.int32), top.to(tl.int32)
    above = level(page_ptr, top, left, height, width, mask)
    above_right = level(page_ptr, top, left + 1, height, width, mask)
    below = level(page_ptr, top + 1, left, height, width, mask)
    below_right = level(page_ptr, top + 1, left + 1, height, width, mask)
    upper = above + right * (above_right - above)
    lower = below + right * (below_right - below)
    turned = tl.floor(upper + down * (lower - upper) + 0.5)
    stored = out_ptr + (page * height + row) * width + column
    tl.store(stored, turned.to(tl.uint8), mask=mask)
