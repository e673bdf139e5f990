"""Linear layers in 8-bit floats beside bfloat16, at the largest weight of an 8B Llama's layer."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Arguments, Case
from kernels.fp8_linear.api import Fp8Linear, fp8_linear, pack_fp8
from kernels.fp8_linear.reference import scaled_product
from kernels.fp8_quantise import reference as fp8_quantise_reference
from kernels.fp8_quantise.api import fp8_quantise

DTYPE = torch.bfloat16
OUT_SIZE, IN_SIZE = 28672, 4096
ROWS = (8192, 1, 32)
SCALE_BYTES = 4
ROUNDINGS = 2 * torch.finfo(DTYPE).eps


def fp8_cases() -> Iterator[Case]:
    """Held to no ceiling: a step of few rows is bound by the launches of its two operations."""
    for num_rows in ROWS:
        yield _quantise(num_rows)
        yield _linear(num_rows)


def _name(op: str, num_rows: int) -> str:
    return op if num_rows == ROWS[0] else f"{op}, {num_rows} rows"


def _quantise(num_rows: int) -> Case:
    return Case(
        _name("fp8_quantise", num_rows),
        f"{num_rows} x {IN_SIZE} bfloat16",
        fp8_quantise,
        fp8_quantise_reference.fp8_quantise,
        partial(_rows, num_rows),
        num_bytes=num_rows * (IN_SIZE * (DTYPE.itemsize + 1) + SCALE_BYTES),
        is_large=False,
    )


def _linear(num_rows: int) -> Case:
    weights = OUT_SIZE * (IN_SIZE + SCALE_BYTES)
    return Case(
        _name("fp8_linear", num_rows),
        f"{num_rows} x {IN_SIZE} by {OUT_SIZE} x {IN_SIZE} float8_e4m3fn, of bfloat16",
        _ours,
        _in_bfloat16,
        partial(_arguments, num_rows),
        num_bytes=weights + DTYPE.itemsize * num_rows * (IN_SIZE + OUT_SIZE),
        rtol=ROUNDINGS,
        atol=ROUNDINGS,
        is_large=False,
        reference=_reference,
    )


def _rows(num_rows: int) -> Arguments:
    return (torch.randn(num_rows, IN_SIZE, device="cuda", dtype=DTYPE),)


def _arguments(num_rows: int) -> Arguments:
    weight = torch.randn(OUT_SIZE, IN_SIZE, device="cuda", dtype=DTYPE) / IN_SIZE**0.5
    return *_rows(num_rows), weight, pack_fp8(weight)


def _ours(x: torch.Tensor, weight: torch.Tensor, packed: Fp8Linear) -> torch.Tensor:
    return fp8_linear(x, packed)


def _in_bfloat16(x: torch.Tensor, weight: torch.Tensor, packed: Fp8Linear) -> torch.Tensor:
    """cuBLAS."""
    return F.linear(x, weight)


def _reference(x: torch.Tensor, weight: torch.Tensor, packed: Fp8Linear) -> torch.Tensor:
    quantised, scales = fp8_quantise_reference.fp8_quantise(x)
    return scaled_product(quantised, scales, packed.weight, packed.scales, x.dtype)
