"""Which matrices are kept narrower than the model computes in, and what that needs.

fp8: those of the layers, in float8_e4m3fn with a scale an output, quantised as they are loaded. The
embedding and the output matrix stay as they are, for there an error is one in a token's own vector
or score, and so do the norms, which are small. A rank scales its own part: of a matrix cut by
columns, an output has a scale on every rank.
"""

from collections.abc import Callable

import torch

from engine.errors import EngineError
from kernels.fp8_linear.api import GPU_DTYPE, MIN_CAPABILITY, Fp8Linear, pack_fp8
from kernels.linear.api import PackedLinear, pack_linear

FP8 = "fp8"

Linear = PackedLinear | Fp8Linear
Pack = Callable[[torch.Tensor, torch.Tensor | None], Linear]


def packer_of(quantization: str | None) -> Pack:
    """Of the matrices of the layers."""
    return pack_linear if quantization is None else pack_fp8


def refuse_quantization(
    quantization: str | None, dtype: torch.dtype, device: str, *, deterministic: bool
) -> None:
    """Raises EngineError for one that is not known, or cannot be had here."""
    if quantization is None:
        return
    if quantization != FP8:
        raise EngineError(f"quantization must be {FP8} or left out, got {quantization!r}")
    if deterministic:
        raise EngineError(
            f"quantization {FP8} is not deterministic: its products depend on the number of rows; "
            "leave out either"
        )
    if not device.startswith("cuda"):
        return
    if dtype != GPU_DTYPE:
        raise EngineError(
            f"quantization {FP8} computes in bfloat16 on a GPU, dtype is {dtype}; "
            "set dtype to bfloat16"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise EngineError(
            f"quantization {FP8} needs a GPU of compute capability 8.9, {device} has "
            f"{capability[0]}.{capability[1]}; leave it out"
        )
