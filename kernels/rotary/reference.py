"""The specification: element i of the first half turns with element i of the second."""

import torch


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, num_heads, head_dim], cos and sin [num_tokens, 1, head_dim] -> like x."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin)
