"""Mutants of rotary."""

import torch

from kernels.errors import ContractError, DeviceAssertion, DoubleStore, OutOfBounds, Uninitialised
from kernels.rotary.reference import rotary
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, far_rows, normal


def turns(
    num_tokens: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = normal(num_tokens, 1, head_dim, seed=5) * 3
    return angles.cos().to(dtype), angles.sin().to(dtype)


OP = Op(
    "rotary",
    "rotary",
    rotary,
    {
        "odd": lambda: (normal(3, 5, 6), *turns(3, 6)),
        "many heads": lambda: (normal(2, 19, 6), *turns(2, 6)),
        "heads of a fused matrix": lambda: (normal(3, 9, 34)[:, 2:7], *turns(3, 34)),
        "bfloat16": lambda: (normal(2, 3, 64).bfloat16(), *turns(2, 64, torch.bfloat16)),
        "far rows": lambda: (
            far_rows(3, 2**30, 8, torch.float16)[:, None],
            *turns(3, 8, torch.float16),
        ),
    },
    rtol=2e-6,
    atol=1e-6,
)
MUTANTS = {
    OP: [
        Mutant(
            "heads past the last",
            "(head < heads) & is_column",
            "(head <= heads) & is_column",
            DoubleStore,
        ),
        Mutant("columns past the last", "columns < half", "columns <= half", DoubleStore),
        Mutant(
            "strides swapped",
            "token * x_token_stride + head * x_head_stride",
            "token * x_head_stride + head * x_token_stride",
            OutOfBounds,
        ),
        Mutant("turned the other way", "first_cos) - second", "first_cos) + second", DIFFERS),
        Mutant(
            "one half's cosines",
            "tl.load(cos_ptr + half + columns",
            "tl.load(cos_ptr + columns",
            DIFFERS,
        ),
        Mutant("half of a turn", "turns = token * 2 * half", "turns = token * half", DIFFERS),
        Mutant(
            "turns of the head",
            "turns = token * 2 * half",
            "turns = tl.program_id(0) * 2 * half",
            OutOfBounds,
        ),
        Mutant(
            "halves over each other",
            "tl.store(out + half, second",
            "tl.store(out, second",
            Uninitialised,
        ),
        Mutant(
            "rows of one half",
            "(token * heads + head) * 2 * half",
            "(token * heads + head) * half",
            DoubleStore,
        ),
        Mutant(
            "int32 rows",
            "(tl.program_id(0) // blocks).to(tl.int64)",
            "tl.program_id(0) // blocks",
            DeviceAssertion,
            "int32 overflows in mul",
        ),
        Mutant(
            "cosines and sines swapped",
            "arguments = (x, cos, sin, out",
            "arguments = (x, sin, cos, out",
            DIFFERS,
            "",
            "api",
        ),
        Mutant(
            "whole heads for halves",
            "num_heads, head_dim // 2)",
            "num_heads, head_dim)",
            ContractError,
            "half must be 3, the size half, came 6",
            "api",
        ),
        Mutant(
            "in the place of its input",
            "x.new_empty(x.shape)",
            "x",
            ContractError,
            "out must be apart from x",
            "api",
        ),
    ]
}
