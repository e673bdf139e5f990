"""Mutants of skip_list."""

import torch

from kernels.errors import OutOfBounds, Uninitialised
from kernels.skip_list import reference
from kernels.tiered_plan.reference import FORMATS
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, normal

BOUNDS = torch.tensor([[0, 64 * 300, 64 * 303, 64 * 305], [64, 64, 192, 200]]).int()
LONG = torch.tensor([[0, 64 * 600, 64 * 601, 64 * 602]]).int()


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
        "more blocks than are held": lambda: (*weighed(1, 1, 700, 1), LONG, FORMATS[0], 0.2),
    },
)
MUTANTS = {
    OP: [
        Mutant("bounds of another sequence", "// kv_heads % sequences", "% sequences", DIFFERS),
        Mutant("the bounds of a layer", "// kv_heads % sequences", "// kv_heads", OutOfBounds),
        Mutant("a warm tier too", "1 if VALUE_BITS == 4 else 2", "2", DIFFERS),
        Mutant("a sink too", "(last - tl.load(bounds_ptr)) // 64", "last // 64", DIFFERS),
        Mutant("natural logarithms", "group - 1)) * LOG2_E", "group - 1))", DIFFERS),
        Mutant("sums of another head", "lse_ptr + head * group", "lse_ptr + head", DIFFERS),
        Mutant("a sum too many", "tl.minimum(row, group - 1)", "row", OutOfBounds),
        Mutant("masses of another head", "head * blocks * group", "head * blocks", DIFFERS),
        Mutant("a mass too many", " & (row < group)\n", "\n", DIFFERS),
        Mutant(
            "the last query's share",
            "greatest = tl.maximum(greatest, share)",
            "greatest = tl.maximum(share, share)",
            DIFFERS,
        ),
        Mutant("the budget of all queries", "tl.maximum(most, chosen", "(most + chosen", DIFFERS),
        Mutant(
            "blocks of the last tile",
            "added(chosen, sums_of_light(others, middle, ROWS), ROWS)",
            "sums_of_light(others, middle, ROWS)",
            DIFFERS,
        ),
        Mutant("blocks of all tiles twice", "range(BLOCKS, num_cold", "range(0, num_cold", DIFFERS),
        Mutant("a limit that is too high", "held[0], low, 0", "held[0], high, 0", DIFFERS),
        Mutant("a limit of none", "others[0], low, start", "others[0], high + 9, start", DIFFERS),
        Mutant("blocks that are none", " & (block < num_cold)\n", "\n", DIFFERS),
        Mutant(
            "no answer past the last block",
            "mask=block < blocks",
            "mask=block < num_cold",
            Uninitialised,
        ),
        Mutant(
            "no answer past those that are held",
            "for start in range(BLOCKS, blocks, TILE):",
            "for start in range(BLOCKS, num_cold, TILE):",
            Uninitialised,
        ),
    ],
}
