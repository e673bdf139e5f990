"""The specification: a row's largest magnitude becomes 448, the largest of float8_e4m3fn, and every
value is rounded once, to the nearest, ties to even. Nothing is left to saturate.

A scale that is no normal number is 1 instead: of a row of zeros, or of less than 5.3e-36, which
becomes zeros. A row with NaN or infinity has NaN or infinity as its scale: no product of it is
finite.
"""

import torch

from kernels.contract import FLOATS, Contract, Output, Size, Stride, Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
CONTRACT = Contract(
    "fp8_quantise",
    x=Tensor("rows size", FLOATS, layout="rows", wide_index=True),
    out=Output("rows size", torch.uint8, wide_index=True),  # the bits of FP8
    scales=Output("rows", torch.float32),
    x_stride=Stride("x", 0),
    size=Size("size"),
)
# A row lies within one BLOCK, and is read once.
METAS = (
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 4096, "num_warps": 8},
    {"BLOCK": 16384, "num_warps": 16},
    {"BLOCK": 32768, "num_warps": 32},
)


def fp8_quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, size] -> float8_e4m3fn [rows, size], scales float32 [rows]: x is about their
    product. A value is multiplied by the scale's reciprocal, each rounded to float32."""
    wide = x.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / LARGEST
    scales = scales.masked_fill(scales < SMALLEST_SCALE, 1.0)
    return (wide * (1 / scales)).to(FP8), scales.squeeze(1)
