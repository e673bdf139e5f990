"""Mutants of fp8_quantise."""

import torch

from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    OutOfBounds,
    Uninitialised,
)
from kernels.fp8_quantise.reference import fp8_quantise
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, far_rows, normal


def with_(value: float) -> torch.Tensor:
    x = normal(3, 40)
    x[1, 7] = value
    return x


def between_values() -> torch.Tensor:
    """From 0 to 2, and their opposites: half way, nearly so, and what the format has."""
    halves = torch.arange(0, 1024) / 1024
    return torch.cat((halves / 16, halves, -2 * halves, torch.tensor([448.0])))[None]


OP = Op(
    "fp8_quantise",
    "fp8_quantise",
    fp8_quantise,
    {
        "odd": lambda: (normal(7, 63),),
        "rows of a wider matrix": lambda: (normal(5, 80)[:, :48],),
        "between values": lambda: (between_values(),),
        "zeros": lambda: (normal(3, 40).mul_(torch.tensor([[1.0], [0.0], [1e-37]])),),
        "not a number": lambda: (with_(float("nan")),),
        "infinite": lambda: (with_(float("inf")),),
        "bfloat16": lambda: (normal(2, 300, dtype=torch.bfloat16),),
        "far rows": lambda: (far_rows(3, 2**30, 8, torch.float16),),
    },
)
OUT = "tl.store(out_ptr + row * size + columns, fp8_bits(scaled).to(tl.uint8), mask=mask)"
LARGEST = "tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=0).to(tl.float32, bitcast=True)"
MUTANTS = {
    OP: [
        Mutant(
            "columns past the last",
            "columns < size",
            "columns <= size",
            DoubleStore,
            "store of out",
        ),
        Mutant(
            "columns but the last",
            "columns < size",
            "columns < size - 1",
            Uninitialised,
            "of out were never stored",
        ),
        Mutant("store without a mask", OUT, OUT.replace(", mask=mask", ""), OutOfBounds, "of out"),
        Mutant("undefined beyond the size", ", other=0.0", "", DIFFERS),
        Mutant(
            "rows without their stride",
            "x_ptr + row * x_stride",
            "x_ptr + row * size",
            OutOfBounds,
            "between its rows",
        ),
        Mutant(
            "stride of the other",
            "out_ptr + row * size",
            "out_ptr + row * x_stride",
            OutOfBounds,
            "store of out",
        ),
        Mutant(
            "int32 rows",
            "tl.program_id(0).to(tl.int64)",
            "tl.program_id(0)",
            DeviceAssertion,
            "int32 overflows in mul",
        ),
        Mutant("largest without its sign", "tl.max(tl.abs(x)", "tl.max((x)", DIFFERS),
        Mutant("a largest that passes NaN by", LARGEST, "tl.max(tl.abs(x), axis=0)", DIFFERS),
        Mutant("scale of another largest", "largest, 448.0", "largest, 240.0", DIFFERS),
        Mutant(
            "scale of a zero row",
            "    scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)\n",
            "",
            DIFFERS,
        ),
        Mutant(
            "scale of NaN lost",
            "scale < 1.1754943508222875e-38, 1.0, scale",
            "scale >= 1.1754943508222875e-38, scale, 1.0",
            DIFFERS,
        ),
        Mutant("the scale itself", "x * tl.div_rn(1.0, scale)", "x * scale", DIFFERS),
        Mutant(
            "scales of one row",
            "tl.store(scales_ptr + row, scale)",
            "tl.store(scales_ptr, scale)",
            DoubleStore,
            "store of scales",
        ),
        Mutant(
            "truncated", "(0x7FFFF - (120 << 23)) + ((bits >> 20) & 1)", "-(120 << 23)", DIFFERS
        ),
        Mutant(
            "ties up",
            "0x7FFFF - (120 << 23)) + ((bits >> 20) & 1)",
            "0x80000 - (120 << 23))",
            DIFFERS,
        ),
        Mutant("ties down", " + ((bits >> 20) & 1)", "", DIFFERS),
        Mutant("another bias", "0x7FFFF - (120 << 23)", "0x7FFFF - (121 << 23)", DIFFERS),
        Mutant("subnormals as normals", "bits < (121 << 23)", "bits < (120 << 23)", DIFFERS),
        Mutant("normals as subnormals", "bits < (121 << 23)", "bits < (123 << 23)", DIFFERS),
        Mutant("signs lost", "magnitude | ", "magnitude | 0 & ", DIFFERS),
        Mutant("NaN as a number", "tl.minimum(normal, 0x7F)", "normal", DIFFERS),
        Mutant(
            "half of the rows",
            "(len(x),), *arguments",
            "(len(x) // 2 + 1,), *arguments",
            Uninitialised,
            "never stored",
            "api",
        ),
        Mutant(
            "size and stride swapped",
            "x.stride(0), x.shape[1])",
            "x.shape[1], x.stride(0))",
            ContractError,
            "x_stride must be 80",
            "api",
        ),
        Mutant(
            "scales of the input's dtype",
            "x.new_empty(len(x), dtype=torch.float32)",
            "x.new_empty(len(x))",
            ContractError,
            "scales must be float32",
            "api",
        ),
        Mutant(
            "floats where bytes are",
            "out.view(torch.uint8)",
            "out",
            ContractError,
            "out must be uint8",
            "api",
        ),
    ]
}
