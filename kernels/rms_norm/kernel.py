"""Each row is read once, normed in registers and stored once.

What a row's sum is made of depends on the size alone, through BLOCK: never on the other rows.
"""

import triton
import triton.language as tl

from kernels.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from kernels.kernel import SERVED, kernel, variants
from kernels.rms_norm.reference import CONTRACT, METAS, RESIDUAL_CONTRACT, RESIDUAL_METAS


@triton.jit
def normed(wide, weight, size, eps):
    """wide [ROWS, BLOCK] fp32, weight, zero beyond the size -> like weight."""
    mean_square = tl.sum(wide * wide, axis=1, keep_dims=True) / size
    rounded = (wide * tl.rsqrt(mean_square + eps)).to(weight.dtype)
    return (weight.to(tl.float32) * rounded.to(tl.float32)).to(weight.dtype)


@kernel(contract=CONTRACT, variants=variants({"x": SERVED}, METAS, unaligned_metas=METAS[-1:]))
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    tokens,
    heads,
    size,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    let_next_kernel_start()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    token = row // heads
    x_row = token * x_token_stride + (row - token * heads) * x_head_stride
    mask = (token < tokens) & (columns < size)
    x = tl.load(x_ptr + x_row + columns, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0)
    out = normed(x.to(tl.float32), weight, size, eps)
    tl.store(out_ptr + row * size + columns, out, mask=mask)


@kernel(
    contract=RESIDUAL_CONTRACT,
    variants=variants({"x": SERVED}, RESIDUAL_METAS, unaligned_metas=RESIDUAL_METAS[-1:]),
)
def rms_norm_residual_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    size,
    eps,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    let_next_kernel_start()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = columns < size
    # A thread reads as many of 16 bits at once as of 32: they then need not change places.
    narrow = tl.max_contiguous(columns, [1, 4])
    x = tl.load(x_ptr + row * x_stride + narrow, mask=mask, other=0.0)
    residual_row = residual_ptr + row * residual_stride + columns
    residual = tl.load(residual_row, mask=mask, other=0.0)
    added = residual + x.to(tl.float32)
    tl.store(residual_row, added, mask=mask)
    weight = tl.load(weight_ptr + narrow, mask=mask, other=0.0)
    tl.store(out_ptr + row * size + narrow, normed(added, weight, size, eps), mask=mask)
