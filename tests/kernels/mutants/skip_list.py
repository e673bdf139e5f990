"""Mutants of skip_list."""

import torch

from kernels.errors import OutOfBounds, Uninitialised
from kernels.skip_list import reference
from kernels.tiered_plan.reference import FORMATS
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, normal

BOUNDS = torch.tensor([[0, 64 * 300, 64 * 303, 64 * 305], [64, 64, 192, 200]]).int()


def weighed(
    num_rows: int, num_kv_heads: int, blocks: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masses of blocks of very different weights, and sums of much more than those."""
    masses = 4 * normal(num_rows, num_kv_heads, blocks, group, seed=3) - 3
    return masses, 8 + normal(num_rows, num_kv_heads * group, seed=4)


OP = Op(
    "skip_list",
    "skip_list",
    reference.skip_list,
    {
        "two layers": lambda: (*weighed(4, 2, 305, 3), BOUNDS, FORMATS[0], 0.03),
        "8 bits": lambda: (*weighed(2, 1, 303, 9), BOUNDS, FORMATS[2], 0.1),
    },
)
MUTANTS = {
    OP: [
        Mutant("bounds of another sequence", "// kv_heads % sequences", "% sequences", DIFFERS),
        Mutant("the bounds of a layer", "// kv_heads % sequences", "// kv_heads", OutOfBounds),
        Mutant("a warm tier too", "1 if VALUE_BITS == 4 else 2", "2", DIFFERS),
        Mutant("a sink too", "(last - tl.load(bounds_ptr)) // 64", "last // 64", DIFFERS),
        Mutant("natural logarithms", "other=0.0) * LOG2_E", "other=0.0)", DIFFERS),
        Mutant("sums of another head", "lse_ptr + head * group", "lse_ptr + head", DIFFERS),
        Mutant("masses of another head", "head * blocks * group", "head * blocks", DIFFERS),
        Mutant(
            "the lightest query's share",
            "is_light = tl.max(shares, 1)",
            "is_light = tl.min(shares, 1)",
            DIFFERS,
        ),
        Mutant("the budget of all queries", "tl.max(chosen, 0)", "tl.sum(chosen, 0)", DIFFERS),
        Mutant("blocks of the last tile", "chosen += tl.sum(", "chosen = tl.sum(", DIFFERS),
        Mutant(
            "a limit that is too high",
            "(tl.max(shares, 1) <= low)",
            "(tl.max(shares, 1) <= high)",
            DIFFERS,
        ),
        Mutant("blocks that are none", " & (block < num_cold)\n", "\n", DIFFERS),
        Mutant(
            "no answer past the last block",
            "for start in range(0, blocks, BLOCKS):",
            "for start in range(0, num_cold, BLOCKS):",
            Uninitialised,
        ),
    ],
}
