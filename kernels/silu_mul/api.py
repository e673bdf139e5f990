"""Entry point of the op."""

import torch

from kernels.silu_mul import reference


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [num_tokens, 2 * size], gate first -> silu(gate) * up, [num_tokens, size]."""
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    return reference.silu_mul(gate_up)
