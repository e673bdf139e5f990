"""Linear layers of an 8B Llama, a decode step's few rows and any number: bound by the weights."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import MIN_ROTATED_BYTES, Arguments, Case
from kernels.linear import reference
from kernels.linear.api import LinearPlan, PackedLinear, linear, linear_silu_mul, pack_linear
from kernels.linear.choose import choose_linears

DTYPE = torch.bfloat16
ROUNDINGS = 2 * torch.finfo(DTYPE).eps
SIZES: Mapping[str, tuple[int, int]] = {  # [out_size, in_size]
    "qkv": (6144, 4096),
    "output": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
LM_HEAD = 128256, 4096  # its products are float32
LARGE = ("linear_gate_up", "linear_down", "linear_lm_head")  # 100 MB and more
FEW, FIXED = (1, 4, 16), (1, 64, 4096)  # rows

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """cuBLAS."""
    return F.linear(x, weight)


def _plain_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reference.linear(x, weight, None, torch.float32)


def linear_cases() -> Iterator[Case]:
    for num_rows in FEW:
        for name, sizes in SIZES.items():
            yield _case(f"linear_{name}", num_rows, *sizes, _planned)
        head = "linear_lm_head", num_rows, *LM_HEAD
        yield _case(*head, _planned_float32, _plain_float32, torch.float32)
        yield _silu_mul(num_rows)
    for num_rows in FIXED:
        yield _case("linear_fixed", num_rows, 4096, 4096, _fixed)


def _case(
    name: str,
    num_rows: int,
    out_size: int,
    in_size: int,
    ours: Product,
    plain: Product = _plain,
    out_dtype: torch.dtype = DTYPE,
) -> Case:
    out_bytes = num_rows * out_size * out_dtype.itemsize
    return Case(
        name if num_rows == 1 else f"{name}, {num_rows} rows",
        f"{num_rows} x {in_size} by {out_size} x {in_size} bfloat16",
        ours,
        plain,
        partial(_arguments, num_rows, out_size, in_size),
        num_bytes=DTYPE.itemsize * (out_size + num_rows) * in_size + out_bytes,
        rtol=ROUNDINGS,
        atol=ROUNDINGS,
        is_large=num_rows == 1 and name in LARGE,
    )


def _silu_mul(num_rows: int) -> Case:
    out_size, in_size = SIZES["gate_up"]
    return Case(
        "linear_silu_mul" if num_rows == 1 else f"linear_silu_mul, {num_rows} rows",
        f"{num_rows} x {in_size} by {out_size} x {in_size} bfloat16",
        _planned_silu_mul,
        _plain_silu_mul,
        partial(_arguments, num_rows, out_size, in_size),
        num_bytes=DTYPE.itemsize * (out_size * in_size + num_rows * (in_size + out_size // 2)),
        rtol=3 * ROUNDINGS,
        atol=ROUNDINGS,
        is_large=num_rows == 1,
    )


def _arguments(num_rows: int, out_size: int, in_size: int) -> Arguments:
    x = torch.randn(num_rows, in_size, device="cuda", dtype=DTYPE)
    return x, torch.randn(out_size, in_size, device="cuda", dtype=DTYPE) / in_size**0.5


def _plain_silu_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reference.linear_silu_mul(x, weight, None)


def _planned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, _packed(weight, _plan(*weight.shape)))


def _planned_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, _packed(weight, _head_plan(*weight.shape), torch.float32))


def _planned_silu_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear_silu_mul(x, _packed(weight, _plan(*weight.shape)))


def _fixed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(x, _packed(weight, LinearPlan()), deterministic=True)


def _packed(
    weight: torch.Tensor, plan: LinearPlan, out_dtype: torch.dtype | None = None
) -> PackedLinear:
    added = _zeros(len(weight))
    return PackedLinear(weight, None, is_packed=False, added=added, plan=plan, out_dtype=out_dtype)


@cache
def _zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, device="cuda", dtype=DTYPE)


@cache
def _plan(out_size: int, in_size: int) -> LinearPlan:
    weights = _cold_weights(out_size, in_size)
    choose_linears([], weights)
    return weights[0].plan


@cache
def _head_plan(out_size: int, in_size: int) -> LinearPlan:
    weights = _cold_weights(out_size, in_size, torch.float32)
    choose_linears(weights)
    return weights[0].plan


def _cold_weights(
    out_size: int, in_size: int, out_dtype: torch.dtype | None = None
) -> list[PackedLinear]:
    """As a start-up chooses by them: the L2 does not hold them."""
    num_weights = max(2, -(-MIN_ROTATED_BYTES // (DTYPE.itemsize * out_size * in_size)))
    return [
        pack_linear(_arguments(1, out_size, in_size)[1], out_dtype=out_dtype)
        for _ in range(num_weights)
    ]
