"""Weights for the tests of linear layers."""

import torch

from kernels.checked_interpreter import checked
from kernels.linear.api import Form, LinearPlan, PackedLinear, pack_linear

CUBLAS = LinearPlan()


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(
    out_size: int,
    in_size: int,
    dtype: torch.dtype,
    plan: LinearPlan = CUBLAS,
    out_dtype: torch.dtype | None = None,
) -> PackedLinear:
    """Not packed: as on a GPU."""
    weight, bias = normal(out_size, in_size, dtype=dtype, seed=1), normal(out_size, dtype=dtype)
    with checked():
        packed = pack_linear(weight / in_size**0.5, bias, out_dtype=out_dtype)
    packed.plan = plan
    return packed


def planned(form: Form) -> LinearPlan:
    numbers = [each for each in (1, 2, 4, 8, 16, 32) if each <= form.max_rows]
    every = dict.fromkeys(numbers, form)
    return LinearPlan(every, every)
