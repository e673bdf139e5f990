"""Entry points of the op: pack a weight once, multiply by it often."""

from dataclasses import dataclass

import torch

from kernels.errors import ContractError
from kernels.fp8_linear.reference import scaled_product
from kernels.fp8_quantise.api import fp8_quantise

MULTIPLE = 16  # of sizes, for the tensor cores' libraries
MIN_CAPABILITY = (8, 9)
GPU_DTYPE = torch.bfloat16  # of x and the result: the one that every library scales rows for

_unscalable: set[tuple[int, int, int]] = set()  # rows, outputs, inputs
_NOT_SUPPORTED = "CUBLAS_STATUS_NOT_SUPPORTED"


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Linear:
    """weight [out_size, in_size] float8_e4m3fn, scales [out_size] float32: the matrix is about
    their product."""

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None


def pack_fp8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Fp8Linear:
    """weight [out_size, in_size] is read, not kept. Raises ContractError when 16 does not divide
    both sizes."""
    if any(size % MULTIPLE or size == 0 for size in weight.shape):
        expected = f"[out_size, in_size], both multiples of {MULTIPLE}"
        raise ContractError("fp8_linear", "weight", expected, f"{list(weight.shape)}")
    return Fp8Linear(*fp8_quantise(weight), bias)


def fp8_linear(x: torch.Tensor, packed: Fp8Linear) -> torch.Tensor:
    """x [num_tokens, in_size] -> [num_tokens, out_size] in x's dtype; on a GPU that is bfloat16.
    Raises ContractError.

    Not batch invariant: libraries choose their kernels by the number of rows.
    """
    assert x.shape[-1] == packed.weight.shape[1], (x.shape, packed.weight.shape)
    if x.is_cuda and x.dtype != GPU_DTYPE:
        raise ContractError("fp8_linear", "x", f"{GPU_DTYPE} on a GPU", f"{x.dtype}")
    quantised, x_scales = fp8_quantise(x)
    product = library_product if x.is_cuda else scaled_product
    result = product(quantised, x_scales, packed.weight, packed.scales, x.dtype)
    return result if packed.bias is None else result.add_(packed.bias)


def library_product(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`scaled_product` by what torch has: cuBLAS from compute capability 9.0 on, else CUTLASS.

    cuBLAS scales rows at some sizes only (not 127 rows of 9216 inputs: pytorch/ao issue 4582), and
    says so before anything runs: there the sums come in float32, and are scaled after.
    """
    sizes = (len(x), *weight.shape)
    if sizes not in _unscalable:
        try:
            return torch._scaled_mm(
                x, weight.t(), x_scales[:, None], scales[None, :], out_dtype=dtype
            )
        except RuntimeError as exc:
            if _NOT_SUPPORTED not in str(exc):
                raise
            _unscalable.add(sizes)
    one = x_scales.new_ones(())
    sums = torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32)
    result = sums.new_empty(sums.shape, dtype=dtype)
    return torch.mul(sums.mul_(x_scales[:, None]), scales, out=result)
