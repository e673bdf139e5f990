"""Entry point of the op."""

import torch

from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.silu_mul import reference

_launch = Launcher(reference.CONTRACT, "kernels.silu_mul.kernel:silu_mul_kernel")


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [num_tokens, 2 * size], gate first -> silu(gate) * up, [num_tokens, size].

    Bitwise batch invariant: an element depends on its own gate and up alone.
    """
    assert gate_up.dim() == 2, gate_up.shape
    assert gate_up.shape[1] % 2 == 0, gate_up.shape
    if not runs_kernels(gate_up):
        return reference.silu_mul(gate_up)
    num_tokens, width = gate_up.shape
    out = gate_up.new_empty(num_tokens, width // 2)
    meta = reference.METAS[out.nbytes >= reference.STREAMED_BYTES]
    grid = (num_tokens * cdiv(width // 2, meta["BLOCK"]),)
    _launch(grid, gate_up, out, gate_up.stride(0), width // 2, **meta)
    return out
