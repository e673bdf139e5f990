"""One pass over both halves: gate and up are read once, the product is stored once."""

import triton.language as tl

from kernels.contract import FLOATS
from kernels.kernel import kernel, variants
from kernels.silu_mul.reference import CONTRACT, META


@kernel(contract=CONTRACT, variants=variants({"gate_up": FLOATS}, [META]))
def silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, size, BLOCK: tl.constexpr):
    # Blocks of one row follow each other, so that programs that run together touch near memory.
    blocks = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_up_ptr + row * gate_up_stride + columns, mask=mask)
    up = tl.load(gate_up_ptr + row * gate_up_stride + size + columns, mask=mask)
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * size + columns, product.to(out_ptr.dtype.element_ty), mask=mask)
