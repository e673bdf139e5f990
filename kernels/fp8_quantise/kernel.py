"""A program a row: read once, scaled in registers, stored once.

Rounded by integer arithmetic, and stored as bytes: alike on every GPU (sm_80 has no float8_e4m3fn)
and in the interpreter.
"""

import triton
import triton.language as tl

from kernels.fp8_quantise.reference import CONTRACT, METAS
from kernels.kernel import SERVED, kernel, variants


@triton.jit
def fp8_bits(x):
    """float32 of at most 448 (1 + 2^-20), or NaN -> the bits of the nearest float8_e4m3fn, int32.

    From 2^-6 on, the exponent and three bits of the mantissa remain, the exponent's bias of 127
    becomes 7; NaN comes out as more than 0x7F. Below, values are multiples of 2^-9, as is every
    float32 from 2^14 to 2^15.
    """
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    normal = (bits + (0x7FFFF - (120 << 23)) + ((bits >> 20) & 1)) >> 20
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0xF
    magnitude = tl.where(bits < (121 << 23), subnormal, tl.minimum(normal, 0x7F))
    return magnitude | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@kernel(contract=CONTRACT, variants=variants({"x": SERVED}, METAS, aligned=(True,)))
def fp8_quantise_kernel(x_ptr, out_ptr, scales_ptr, x_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    # Compared as integers: so that NaN, of which the bits are the largest, is the largest too.
    largest = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, 448.0)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
    scaled = x * tl.div_rn(1.0, scale)
    tl.store(out_ptr + row * size + columns, fp8_bits(scaled).to(tl.uint8), mask=mask)
    tl.store(scales_ptr + row, scale)
