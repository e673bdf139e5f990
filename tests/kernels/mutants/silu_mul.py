"""Mutants of silu_mul."""

import torch

from kernels.errors import ContractError, DeviceAssertion, DoubleStore, OutOfBounds, Uninitialised
from kernels.silu_mul.reference import silu_mul
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, far_rows, normal

OP = Op(
    "silu_mul",
    "silu_mul",
    silu_mul,
    {
        "odd": lambda: (normal(3, 126),),
        "strided rows": lambda: (normal(3, 80)[:, :34],),
        "two blocks": lambda: (normal(2, 4108),),
        "bfloat16": lambda: (normal(2, 300, dtype=torch.bfloat16),),
        "far rows": lambda: (far_rows(3, 2**30, 8, torch.float16),),
    },
    rtol=2e-6,
    atol=1e-7,
)
GATES = "gate_up_ptr + row * gate_up_stride + columns"
GATE = "tl.load(gates, mask=mask, "
STORE = "tl.store(out_ptr + row * size + columns, product, mask=mask, "
MUTANTS = {
    OP: [
        Mutant(
            "mask one too wide", "columns < size", "columns <= size", DoubleStore, "store of out"
        ),
        Mutant(
            "mask one too narrow", "columns < size", "columns < size - 1", Uninitialised, "3 of 189"
        ),
        Mutant(
            "load without a mask", GATE, GATE.replace("mask=mask, ", ""), OutOfBounds, "gate_up"
        ),
        Mutant(
            "store without a mask", STORE, STORE.replace("mask=mask, ", ""), OutOfBounds, "of out"
        ),
        Mutant(
            "gate where up is",
            "gates + size",
            "gates",
            DIFFERS,
        ),
        Mutant(
            "stride of the other",
            STORE,
            STORE.replace("row * size", "row * gate_up_stride"),
            OutOfBounds,
            "store of out",
        ),
        Mutant(
            "rows without their stride", GATES, GATES.replace("gate_up_stride", "size"), DIFFERS
        ),
        Mutant(
            "int32 rows",
            "(tl.program_id(0) // blocks).to(tl.int64)",
            "tl.program_id(0) // blocks",
            DeviceAssertion,
            "int32 overflows in mul",
        ),
        Mutant(
            "always the first block",
            "tl.program_id(0) % blocks * BLOCK",
            "0 * BLOCK",
            DoubleStore,
            "program (0, 0, 0) stored",
        ),
        Mutant("not rounded between", ".to(gate.dtype)", "", DIFFERS),
        Mutant(
            "a row a program",
            'num_tokens * cdiv(width // 2, meta["BLOCK"])',
            "num_tokens",
            Uninitialised,
            "of out were never stored",
            "api",
        ),
        Mutant(
            "a block too many",
            'cdiv(width // 2, meta["BLOCK"])',
            '(1 + cdiv(width // 2, meta["BLOCK"]))',
            OutOfBounds,
            "gate_up",
            "api",
        ),
        Mutant(
            "stride and size swapped",
            "gate_up.stride(0), width // 2",
            "width // 2, gate_up.stride(0)",
            ContractError,
            "gate_up_stride must be 126",
            "api",
        ),
        Mutant(
            "another dtype",
            "new_empty(num_tokens, width // 2)",
            "new_empty(num_tokens, width // 2, dtype=torch.float32)",
            ContractError,
            "out must be bfloat16 like gate_up",
            "api",
        ),
        Mutant(
            "into its input",
            "gate_up.new_empty(num_tokens, width // 2)",
            "gate_up.flatten()[: num_tokens * width // 2].view(num_tokens, -1)",
            ContractError,
            "out must be apart from gate_up",
            "api",
        ),
    ]
}
