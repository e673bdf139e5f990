"""For memcheck: a kernel without its mask, which stores past the end of its argument."""

import torch
import triton
import triton.language as tl


@triton.jit
def overrun_kernel(out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, offsets)


if __name__ == "__main__":
    out = torch.empty(1000, dtype=torch.int32, device="cuda")
    overrun_kernel[(1,)](out, BLOCK=1024)
    torch.cuda.synchronize()
