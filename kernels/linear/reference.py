"""The specification."""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [num_tokens, in_size], weight [out_size, in_size], bias [out_size] -> [num_tokens, out]."""
    return F.linear(x, weight, bias)
