"""How much ink a window along a line has, by running counts: its length costs nothing.

A window of `length` ends `ahead` of the pixel it is counted for; where it has at least `need` ink,
`value` is stored, elsewhere 255 - value. A run of L ends where the L pixels up to here are ink; a
pixel lies in such a run where one ends among itself and the L - 1 after it. Beyond the page there
is no ink.
"""

import triton
import triton.language as tl

from kernels.image.lines.api import COLUMNS_METAS, PROJECTIONS_METAS, ROWS_METAS
from kernels.image.lines.reference import COLUMNS_CONTRACT, PROJECTIONS_CONTRACT, ROWS_CONTRACT
from kernels.kernel import kernel, variants


@triton.jit
def ink(pointers, mask):
    return (tl.load(pointers, mask=mask, other=255) < 128).to(tl.int32)


@kernel(contract=ROWS_CONTRACT, variants=variants({}, ROWS_METAS, aligned=(True,)))
def row_windows_kernel(
    pages_ptr,
    out_ptr,
    height,
    width,
    length,
    ahead,
    need,
    value,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    row = (tl.program_id(0).to(tl.int64) * height + y) * width
    count = tl.zeros((ROWS, 1), tl.int32)
    start = -((ahead + BLOCK - 1) // BLOCK) * BLOCK  # there the window is before the page
    for left in range(start, width, BLOCK):
        x = left + tl.arange(0, BLOCK)[None, :]
        enters, leaves = x + ahead, x + ahead - length
        is_row = y < height
        entering = ink(pages_ptr + row + enters, is_row & (enters >= 0) & (enters < width))
        leaving = ink(pages_ptr + row + leaves, is_row & (leaves >= 0) & (leaves < width))
        change = entering - leaving
        counts = count + tl.cumsum(change, 1)
        count += tl.sum(change, 1, keep_dims=True)
        stored = tl.where(counts >= need, value, 255 - value).to(tl.uint8)
        tl.store(out_ptr + row + x, stored, mask=is_row & (x >= 0) & (x < width))


@kernel(contract=COLUMNS_CONTRACT, variants=variants({}, COLUMNS_METAS, aligned=(True,)))
def column_windows_kernel(
    pages_ptr,
    out_ptr,
    height,
    width,
    length,
    ahead,
    need,
    value,
    segment,
    BLOCK: tl.constexpr,
):
    x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = tl.program_id(0).to(tl.int64) * height * width + x
    is_column = x < width
    top = tl.program_id(2) * segment
    count = tl.zeros((BLOCK,), tl.int32)
    first = tl.maximum(top + ahead - length + 1, 0)
    for y in range(first, tl.minimum(top + ahead, height)):
        count += ink(pages_ptr + page + tl.cast(y, tl.int64) * width, is_column)
    for y in range(top, tl.minimum(top + segment, height)):
        enters, leaves = x * 0 + y + ahead, x * 0 + y + ahead - length
        enter_row = page + enters.to(tl.int64) * width
        leave_row = page + (leaves + 1).to(tl.int64) * width
        count += ink(pages_ptr + enter_row, is_column & (enters < height))
        stored = tl.where(count >= need, value, 255 - value).to(tl.uint8)
        tl.store(out_ptr + page + tl.cast(y, tl.int64) * width, stored, mask=is_column)
        is_inside = (leaves >= -1) & (leaves + 1 < height)
        count -= ink(pages_ptr + leave_row, is_column & is_inside)


@kernel(contract=PROJECTIONS_CONTRACT, variants=variants({}, PROJECTIONS_METAS, aligned=(True,)))
def projections_kernel(
    pages_ptr,
    rows_ptr,
    columns_ptr,
    height,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page = tl.program_id(0).to(tl.int64)
    y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    pages_ptr += page * height * width
    in_row = tl.zeros((ROWS,), tl.int32)
    for left in range(0, width, BLOCK):
        x = left + tl.arange(0, BLOCK)
        mask = (y < height)[:, None] & (x < width)[None, :]
        dark = ink(pages_ptr + y.to(tl.int64)[:, None] * width + x[None, :], mask)
        in_row += tl.sum(dark, 1)
        tl.atomic_add(columns_ptr + page * width + x, tl.sum(dark, 0), mask=x < width)
    tl.store(rows_ptr + page * height + y, in_row, mask=y < height)
