"""The specification: a weight has a scale an output, x one a row (`fp8_quantise`); products of what
both were rounded to are summed in float32, scaled, and rounded once, before the bias is added."""

import torch
import torch.nn.functional as F


def scaled_product(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x [rows, in_size], weight [out_size, in_size], both float8_e4m3fn, x_scales [rows], scales
    [out_size] float32 -> [rows, out_size] in `dtype`."""
    sums = F.linear(x.float(), weight.float())
    return (sums * x_scales[:, None] * scales).to(dtype)
