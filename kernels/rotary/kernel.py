"""A program turns some heads of one token: its cosines and sines are read once for all of them."""

import triton
import triton.language as tl

from kernels.kernel import SERVED, kernel, variants
from kernels.rotary.reference import CONTRACT, METAS


@triton.jit
def scaled(x, cos):
    """x * cos, rounded to the dtype: the first of a turn's two roundings."""
    return (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton.jit
def rotated(x_ptr, cos_ptr, sin_ptr, offsets, columns, half, mask, is_column):
    """Both halves of the heads at x_ptr + offsets, turned with a token's cosines and sines."""
    first = tl.load(x_ptr + offsets, mask=mask)
    second = tl.load(x_ptr + offsets + half, mask=mask)
    first_cos = tl.load(cos_ptr + columns, mask=is_column)
    second_cos = tl.load(cos_ptr + half + columns, mask=is_column)
    first_sin = tl.load(sin_ptr + columns, mask=is_column).to(tl.float32)
    second_sin = tl.load(sin_ptr + half + columns, mask=is_column).to(tl.float32)
    first_turned = scaled(first, first_cos) - second.to(tl.float32) * first_sin
    second_turned = scaled(second, second_cos) + first.to(tl.float32) * second_sin
    return first_turned.to(first.dtype), second_turned.to(second.dtype)


# Steps call rope_append; this is for tools, which compile other dtypes when they come.
@kernel(contract=CONTRACT, variants=variants({"x": SERVED}, METAS, unaligned_metas=METAS[-1:]))
def rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    x_token_stride,
    x_head_stride,
    heads,
    half,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    blocks = tl.cdiv(heads, HEADS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    is_column = columns < half
    mask = (head < heads) & is_column
    head = head.to(tl.int64)

    turns = token * 2 * half
    offsets = token * x_token_stride + head * x_head_stride + columns
    first, second = rotated(
        x_ptr, cos_ptr + turns, sin_ptr + turns, offsets, columns, half, mask, is_column
    )
    out = out_ptr + (token * heads + head) * 2 * half + columns
    tl.store(out, first, mask=mask)
    tl.store(out + half, second, mask=mask)
