"""Mutants of rms_norm."""

import torch

from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    OutOfBounds,
    StoredInput,
    Uninitialised,
)
from kernels.rms_norm.reference import rms_norm
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, far_rows, normal

WEIGHT = normal(63, seed=1)
OP = Op(
    "rms_norm",
    "rms_norm",
    rms_norm,
    {
        "many rows a program": lambda: (normal(7, 48), WEIGHT[:48], 1e-5),
        "odd": lambda: (normal(7, 63), WEIGHT, 1e-5),
        "heads of a fused matrix": lambda: (normal(3, 9, 60)[:, 2:7], WEIGHT[:60], 1e-5),
        "small values": lambda: (normal(19, 48) * 1e-3, WEIGHT[:48], 1e-5),
        "residual": lambda: (normal(3, 63), WEIGHT, 1e-5, normal(3, 63, seed=2)),
        "residual of another stride": lambda: (
            normal(3, 63),
            WEIGHT,
            1e-5,
            normal(3, 80, seed=2)[:, :63],
        ),
        "bfloat16": lambda: (
            normal(2, 63).bfloat16(),
            WEIGHT.bfloat16(),
            1e-5,
            normal(2, 63, seed=2),
        ),
        "far rows": lambda: (far_rows(3, 2**30, 8, torch.float16), torch.ones(8).half(), 1e-5),
    },
    rtol=2e-6,
    atol=1e-7,
)
X = "tl.load(x_ptr + x_row + columns, mask=mask, other=0.0)"
MUTANTS = {
    OP: [
        Mutant(
            "rows past the last",
            "mask = (token < tokens) & (columns < size)",
            "mask = (token >= 0) & (columns < size)",
            OutOfBounds,
            "x",
        ),
        Mutant(
            "columns past the last",
            "(token < tokens) & (columns < size)",
            "(token < tokens) & (columns <= size)",
            OutOfBounds,
            "x",
        ),
        Mutant(
            "weight without a mask",
            "mask=columns < size, other=0.0)",
            "mask=columns < BLOCK, other=0.0)",
            OutOfBounds,
            "weight",
        ),
        Mutant("undefined beyond the size", X, X.replace(", other=0.0", ""), DIFFERS),
        Mutant(
            "strides swapped",
            "token * x_token_stride + (row - token * heads) * x_head_stride",
            "token * x_head_stride + (row - token * heads) * x_token_stride",
            OutOfBounds,
            "x",
        ),
        Mutant(
            "mean of the block",
            "keep_dims=True) / size",
            "keep_dims=True) / wide.shape[1]",
            DIFFERS,
        ),
        Mutant("no epsilon", "tl.rsqrt(mean_square + eps)", "tl.rsqrt(mean_square)", DIFFERS),
        Mutant(
            "int32 rows",
            "tl.program_id(0).to(tl.int64) * ROWS",
            "tl.program_id(0) * ROWS",
            DeviceAssertion,
            "int32 overflows in mul",
        ),
        Mutant(
            "rows of one program",
            "tl.program_id(0).to(tl.int64) * ROWS",
            "tl.program_id(0).to(tl.int64) * (ROWS - 1)",
            DoubleStore,
            "store of out",
        ),
        Mutant("sum not stored", "    tl.store(residual_row, added, mask=mask)\n", "", DIFFERS),
        Mutant(
            "sum into the input",
            "tl.store(residual_row, added",
            "tl.store(x_ptr + row * x_stride + columns, added",
            StoredInput,
            "store into x",
        ),
        Mutant(
            "stride of the other",
            "residual_ptr + row * residual_stride",
            "residual_ptr + row * x_stride",
            OutOfBounds,
            "between its rows",
        ),
        Mutant(
            "norm of the input alone",
            "normed(added, ",
            "normed(x.to(tl.float32), ",
            DIFFERS,
        ),
        Mutant(
            "sum rounded on its way",
            "residual + x.to(tl.float32)",
            "(residual + x.to(tl.float32)).to(x.dtype).to(tl.float32)",
            DIFFERS,
        ),
        Mutant(
            "half of the rows",
            "(len(x),)",
            "(cdiv(len(x), 2),)",
            Uninitialised,
            "of out were never stored",
            "api",
        ),
        Mutant(
            "a residual that is the input",
            "arguments = (x, residual, weight, out,",
            "arguments = (x, x, weight, out,",
            ContractError,
            "residual must be apart from x",
            "api",
        ),
        Mutant(
            "sizes swapped",
            "tokens, heads, size, eps",
            "heads, tokens, size, eps",
            ContractError,
            "tokens must be 7, the size tokens, came 1",
            "api",
        ),
        Mutant(
            "whole programs only",
            'cdiv(tokens * heads, meta["ROWS"])',
            'tokens * heads // meta["ROWS"]',
            ContractError,
            "the grid must be of some programs, for out has elements",
            "api",
        ),
    ]
}
