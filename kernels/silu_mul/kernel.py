"""One pass over both halves: gate and up are read once, the product is stored once."""

import triton.language as tl

from kernels.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from kernels.kernel import SERVED, kernel, variants
from kernels.silu_mul.reference import CONTRACT, METAS


@kernel(contract=CONTRACT, variants=variants({"gate_up": SERVED}, METAS))
def silu_mul_kernel(
    gate_up_ptr, out_ptr, gate_up_stride, size, BLOCK: tl.constexpr, STREAM: tl.constexpr
):
    wait_for_earlier_kernels()
    let_next_kernel_start()
    # Blocks of one row follow each other, so that programs that run together touch near memory.
    blocks = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gates = gate_up_ptr + row * gate_up_stride + columns
    gate = tl.load(gates, mask=mask, eviction_policy="evict_first")
    up = tl.load(gates + size, mask=mask, eviction_policy="evict_first")
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    product = (activated.to(tl.float32) * up.to(tl.float32)).to(out_ptr.dtype.element_ty)
    CACHE: tl.constexpr = ".cs" if STREAM else ""
    tl.store(out_ptr + row * size + columns, product, mask=mask, cache_modifier=CACHE)
