"""The specification: fp32 statistics, the result rounded before the weight is applied, as Hugging
Face does. With a residual (vLLM's fused_add_rms_norm): the sum is rounded to the dtype first, and
it is this rounded sum that is stored back and normed, as if by two operations."""

import torch

from kernels.contract import FLOATS, Contract, Count, InOut, Output, Scalar, Size, Stride, Tensor

SHAPE = "tokens heads size"  # a row is the last dimension
CONTRACT = Contract(
    "rms_norm",
    x=Tensor(SHAPE, FLOATS, layout="rows", wide_index=True),
    weight=Tensor("size", like="x"),
    out=Output(SHAPE, like="x", wide_index=True),
    x_token_stride=Stride("x", 0),
    x_head_stride=Stride("x", 1),
    tokens=Count("tokens"),
    heads=Count("heads"),
    size=Size("size"),
    eps=Scalar(float, low=0.0),
)
RESIDUAL_CONTRACT = Contract(
    "rms_norm_residual",
    x=Tensor("tokens size", FLOATS, layout="rows", wide_index=True),
    residual=InOut("tokens size", like="x", layout="rows", wide_index=True),
    weight=Tensor("size", like="x"),
    out=Output("tokens size", like="x", wide_index=True),
    x_stride=Stride("x", 0),
    residual_stride=Stride("residual", 0),
    size=Size("size"),
    eps=Scalar(float, low=0.0),
)
# A row lies within one BLOCK: a wider one than it needs costs nothing but idle registers.
METAS = (
    {"ROWS": 16, "BLOCK": 128, "num_warps": 4},
    {"ROWS": 1, "BLOCK": 1024, "num_warps": 4},
    {"ROWS": 1, "BLOCK": 4096, "num_warps": 8},
    {"ROWS": 1, "BLOCK": 16384, "num_warps": 16},
)
RESIDUAL_METAS = (
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 4096, "num_warps": 8},
    {"BLOCK": 16384, "num_warps": 16},
)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., size], weight [size] -> [..., size] in x's dtype.

    residual, like x: becomes residual + x in place, and its norm is the result.
    """
    if residual is not None:
        x = residual.add_(x)
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
