"""Mutants of linear: of few rows, with the activation, and of any number of rows."""

from functools import partial

import torch
import torch.nn.functional as F

from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    OutOfBounds,
    StoredInput,
    Uninitialised,
)
from kernels.linear.api import LINEARS, SILU_MULS, Form, LinearPlan, PackedLinear
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, far_rows, normal
from tests.kernels.tolerances import ROUNDINGS

HALF = torch.float16


def by_rows(*forms: Form) -> dict[int, Form]:
    return {form.max_rows: form for form in reversed(forms)}


PLAN = LinearPlan(by_rows(*LINEARS), by_rows(*SILU_MULS))


def weights_of(
    out_size: int,
    in_size: int,
    dtype: torch.dtype = HALF,
    out_dtype: torch.dtype | None = None,
) -> PackedLinear:
    weight, bias = normal(out_size, in_size, seed=1), normal(out_size, dtype=dtype, seed=2)
    scaled = (weight / in_size**0.5).to(dtype)
    return PackedLinear(scaled, bias, is_packed=False, added=bias, plan=PLAN, out_dtype=out_dtype)


wide_weights_of = partial(weights_of, out_dtype=torch.float32)


def rows(num_rows: int, in_size: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    """Of another stride than their size."""
    return normal(num_rows, in_size + 5, dtype=dtype)[:, :in_size]


def linear(x: torch.Tensor, packed: PackedLinear, *, deterministic: bool = False) -> torch.Tensor:
    product = F.linear(x.float(), packed.weight.float(), packed.added.float())
    return product.to(packed.out_dtype or x.dtype)


def linear_silu_mul(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    gate, up = linear(x, packed).chunk(2, dim=-1)
    return F.silu(gate.float()).to(x.dtype) * up


LINEAR = Op(
    "linear",
    "linear",
    linear,
    {
        "one row": lambda: (rows(1, 1030), weights_of(6, 1030)),
        "seven rows": lambda: (rows(7, 530), weights_of(20, 530)),
        "fifteen rows": lambda: (rows(15, 130), weights_of(70, 130)),
        "far rows": lambda: (far_rows(5, 2**29, 8, HALF), weights_of(5, 8)),
    },
    rtol=ROUNDINGS[HALF],
    atol=1e-3,
)
FLOAT32 = Op(
    "linear",
    "linear",
    linear,
    {
        "one row": lambda: (rows(1, 1030), wide_weights_of(6, 1030)),
        "seven rows": lambda: (rows(7, 530), wide_weights_of(20, 530)),
        "fifteen rows": lambda: (rows(15, 130), wide_weights_of(70, 130)),
    },
    rtol=1e-6,
    atol=2e-6,
)
SILU = Op(
    "linear",
    "linear_silu_mul",
    linear_silu_mul,
    {
        "one row": lambda: (rows(1, 1030), weights_of(12, 1030)),
        "seven rows": lambda: (rows(7, 530), weights_of(40, 530)),
    },
    rtol=2 * ROUNDINGS[HALF],
    atol=1e-3,
)
FIXED = Op(
    "linear",
    "fixed",
    linear,
    {
        "one row": lambda: (rows(1, 40), weights_of(20, 40)),
        "many rows and outputs": lambda: (rows(67, 70), weights_of(70, 70)),
        "far rows": lambda: (far_rows(3, 2**30, 8, HALF), weights_of(5, 8)),
    },
    rtol=ROUNDINGS[HALF],
    atol=1e-3,
)
X = "tl.load(xs + start, mask=mask, other=0.0)"
ROW = "tl.load(x_ptr + start + column, mask=column < in_size - start, other=0.0)"
one = partial(Mutant, within="linear_one_row_kernel")
few = partial(Mutant, within="linear_few_rows_kernel")
one_silu = partial(Mutant, within="linear_silu_mul_one_row_kernel")
few_silu = partial(Mutant, within="linear_silu_mul_few_rows_kernel")
tiled = partial(Mutant, within="linear_tiled_kernel")
SIZES = "sizes = (x.stride(0), num_rows, out_size, in_size)"
MUTANTS = {
    LINEAR: [
        Mutant("weights past the last", "(column < end),", "(column <= end),", OutOfBounds,
               "weight"),
        Mutant("undefined weights of one row", "(column < end), other=0.0)", "(column < end))",
               DIFFERS),
        one("outputs past the last", "output < out_size", "output <= out_size", OutOfBounds),
        one("columns past the last", "mask=column < in_size", "mask=column <= in_size",
            OutOfBounds, "x"),
        one("an undefined row", ROW, ROW.replace(", other=0.0", ""), DIFFERS),
        one("the last turn alone", "sums.shape), sums)", "sums.shape), sums * 0)", DIFFERS),
        one("turns that overlap", "in_size, TILE, num", "in_size, TILE // 2, num", DIFFERS),
        one("a column for all", "tl.sum(sums, axis=1, keep", "tl.max(sums, axis=1, keep", DIFFERS),
        one("result into the input", "tl.store(out_ptr", "tl.store(x_ptr", StoredInput),
        few("rows past the last", "row < rows", "row <= rows", OutOfBounds, "x"),
        few("outputs past the last", "output < out_size", "output <= out_size", OutOfBounds),
        Mutant("parts past the last", "(column < end)[", "(column <= end)[", OutOfBounds, "weight"),
        few("columns past the last", "(column < in_size - start)[", "(column <= in_size - start)[",
            OutOfBounds, "x"),
        Mutant("undefined parts", "mask=mask, other=0.0)", "mask=mask)", DIFFERS,
               within="load_parts"),
        few("undefined rows", X, X.replace(", other=0.0", ""), DIFFERS),
        few("int32 rows", "row.to(tl.int64) * x_stride", "row * x_stride", DeviceAssertion,
            "int32 overflows in mul"),
        few("every part the first", "[:, None] * TILE", "[:, None] * 0", DIFFERS),
        few("parts that overlap", "(0, in_size, PARTS * TILE)", "(0, in_size, TILE)", DIFFERS),
        few("the last parts alone", "tl.dot(weight, x, sums)", "tl.dot(weight, x)", DIFFERS),
        few("the greatest part", "tl.sum(sums, axis=0)", "tl.max(sums, axis=0)", DIFFERS),
        Mutant("no bias", " + bias.to(tl.float32)[:, None]", "", DIFFERS),
        Mutant("one bias", "tl.load(bias_ptr + output,", "tl.load(bias_ptr + output * 0,", DIFFERS),
        few("rows of another size", "row.to(tl.int64) * out_size", "row.to(tl.int64) * in_size",
            OutOfBounds, "out"),
        few("result into the weight", "stored = out_ptr", "stored = weight_ptr", StoredInput),
        Mutant("sizes swapped", SIZES, "sizes = (x.stride(0), num_rows, in_size, out_size)",
               ContractError, "out_size must be 20, the size out_size, came 530", "api"),
        Mutant("a stride for a size", SIZES, "sizes = (in_size, num_rows, out_size, in_size)",
               ContractError, "x_stride must be 535", "api"),
        Mutant("one row of several", "(programs,), *tensors, out_size, in_size",
               "(programs,), *tensors, in_size, out_size", ContractError, "out_size must be 6",
               "api"),
        Mutant("whole programs only", 'cdiv(out_size, meta["OUTPUTS"])',
               'out_size // meta["OUTPUTS"]', Uninitialised, "of out were never stored", "api"),
    ],
    FLOAT32: [
        one("a rounded result", "out_ptr.dtype.element_ty", "x_ptr.dtype.element_ty", DIFFERS),
        few("a rounded result", "out_ptr.dtype.element_ty", "x_ptr.dtype.element_ty", DIFFERS),
        tiled("a rounded result", "out_ptr.dtype.element_ty", "x_ptr.dtype.element_ty", DIFFERS),
        Mutant("the dtype of the input", ", dtype=packed.out_dtype", "", DIFFERS, file="api"),
    ],
    SILU: [
        one_silu("gates twice", "((output + size) * in_size)", "(output * in_size)", DIFFERS),
        one_silu("gates for ups", "tl.fma(up.to", "tl.fma(gate.to", DIFFERS),
        one_silu("the gate's bias", "bias_ptr + size", "bias_ptr", DIFFERS),
        one_silu("ups past the last", "output < size", "output <= size", OutOfBounds),
        one_silu("an undefined row", ROW, ROW.replace(", other=0.0", ""), DIFFERS),
        few_silu("gates twice", "((output + size) * in_size)", "(output * in_size)", DIFFERS),
        few_silu("gates for ups", "tl.dot(up, x, up_sums)", "tl.dot(gate, x, up_sums)", DIFFERS),
        few_silu("the gate's bias", "bias_ptr + size", "bias_ptr", DIFFERS),
        few_silu("ups past the last", "output < size", "output <= size", OutOfBounds),
        few_silu("undefined rows", X, X.replace(", other=0.0", ""), DIFFERS),
        few_silu("rows past the last", "row < rows", "row <= rows", OutOfBounds, "x"),
        Mutant("the other sigmoid", "tl.exp(-gate)", "tl.exp(gate)", DIFFERS),
        Mutant("no sigmoid", "gate / (1 + tl.exp(-gate))", "gate", DIFFERS),
        Mutant("the whole matrix", " // form.weights_per_output", "", ContractError,
               "out must be [1 size] where size = 6", "api"),
    ],
    FIXED: [
        tiled("rows past the last", "row < rows", "row <= rows", OutOfBounds, "x"),
        tiled("outputs past the last", "output < out_size", "output <= out_size", OutOfBounds),
        tiled("columns past the last", "(column < in_size", "(column <= in_size", OutOfBounds, "x"),
        tiled("undefined rows", X, X.replace(", other=0.0", ""), DIFFERS),
        tiled("always the first rows", "(tl.program_id(0) % tiles)", "(tl.program_id(0) * 0)",
              DoubleStore),
        tiled("always the first outputs", "(tl.program_id(0) // tiles)", "(tl.program_id(0) * 0)",
              DoubleStore),
        tiled("int32 rows", "(tl.program_id(0) % tiles).to(tl.int64)", "(tl.program_id(0) % tiles)",
              DeviceAssertion, "int32 overflows in mul"),
        tiled("the last turn alone", "x, sums, input", "x, sums * 0, input", DIFFERS),
        tiled("rows of another size", "row * out_size", "row * in_size", OutOfBounds, "out"),
        tiled("result into the input", "stored = out_ptr", "stored = x_ptr", StoredInput),
        Mutant("one tile of rows", 'cdiv(num_rows, meta["ROWS"]) * programs', "programs",
               Uninitialised, "of out were never stored", "api"),
        Mutant("one tile of outputs", 'cdiv(num_rows, meta["ROWS"]) * programs',
               'cdiv(num_rows, meta["ROWS"])', Uninitialised, "of out were never stored", "api"),
    ],
}  # fmt: skip
