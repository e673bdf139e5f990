"""Mutants of image/convert."""

import torch

from kernels.errors import ContractError, DoubleStore, OutOfBounds, Uninitialised
from kernels.image.convert import reference
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op


def pages(*shape: int) -> tuple[torch.Tensor]:
    """Levels of every kind: noise, and the ends of the range in all combinations."""
    levels = torch.randint(0, 256, (*shape, 3), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 255])
    flat = levels.view(-1, 3)
    flat[: min(8, len(flat))] = torch.cartesian_prod(ends, ends, ends)[: len(flat)]
    return (levels.to(torch.uint8),)


CASES = {
    "odd": lambda: pages(2, 3, 7),
    "fewer than a group": lambda: pages(1, 1, 5),
    "two programs": lambda: pages(1, 5, 833),
}
GREY = Op("image/convert", "grey", reference.grey, CASES)
YCRCB = Op("image/convert", "to_ycrcb", reference.to_ycrcb, CASES)
SWAP = Op("image/convert", "swap_channels", reference.swap_channels, CASES)
IN_GREY, IN_COLOUR = "grey_kernel", "colour_kernel"
FIRST = "if tl.program_id(0) == 0:"
MUTANTS = {
    GREY: [
        Mutant(
            "groups past the last",
            "group < groups",
            "group <= groups",
            OutOfBounds,
            "load of pages",
            within=IN_GREY,
        ),
        Mutant(
            "groups without the last",
            "group < groups",
            "group < groups - 1",
            Uninitialised,
            "16 of 42",
            within=IN_GREY,
        ),
        Mutant(
            "store without a mask",
            "tl.store(stored, greys, mask=mask)",
            "tl.store(stored, greys)",
            OutOfBounds,
            "store of out",
        ),
        Mutant(
            "rest without a mask",
            "grey_of(blue, green, red).to(tl.uint8), mask=rest)",
            "grey_of(blue, green, red).to(tl.uint8))",
            OutOfBounds,
            "store of out",
        ),
        Mutant(
            "rest left out",
            FIRST,
            "if tl.program_id(0) < 0:",
            Uninitialised,
            "10 of 42",
            within=IN_GREY,
        ),
        Mutant(
            "rest of every program",
            FIRST,
            "if tl.program_id(0) >= 0:",
            DoubleStore,
            "program (0, 0, 0) stored",
            within=IN_GREY,
        ),
        Mutant(
            "weights swapped",
            "9798 * red + 19235 * green + 3735 * blue",
            "3735 * red + 19235 * green + 9798 * blue",
            DIFFERS,
        ),
        Mutant("not rounded", " + 16384) >> 15", ") >> 15", DIFFERS),
        Mutant("bytes of a group", "group * 12 + quarter", "group * 3 + quarter", DIFFERS),
        Mutant(
            "words for bytes",
            "group * 4 + quarter",
            "group * 16 + quarter",
            OutOfBounds,
            "store of out",
        ),
        Mutant(
            "a half-aligned word",
            "pages_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + group * 12",
            "(pages_ptr + 2).to(tl.pointer_type(tl.uint32), bitcast=True) + group * 12",
            OutOfBounds,
            "that 4 does not divide",
            within=IN_GREY,
        ),
        Mutant(
            "no program for the rest",
            "(max(min(num_pixels, 1), cdiv(num_pixels // PIXELS, block)),)",
            "(cdiv(num_pixels // PIXELS, block),)",
            ContractError,
            "the grid must be of some programs",
            "api",
        ),
        Mutant(
            "channels for pixels",
            "num_pixels = out.numel()",
            "num_pixels = pages_bgr.numel()",
            ContractError,
            "pixels must be 42, the size pixels, came 126",
            "api",
        ),
    ],
    YCRCB: [
        Mutant(
            "red and blue differences swapped",
            "tl.minimum(tl.maximum(cr, 0), 255)",
            "tl.minimum(tl.maximum(cb, 0), 255)",
            DIFFERS,
        ),
        Mutant("not clamped", "tl.minimum(tl.maximum(cr, 0), 255)", "cr", DIFFERS),
        Mutant("weights of grey", "+ 8192) >> 14", "+ 16384) >> 15", DIFFERS),
        Mutant(
            "the second words twice",
            "tl.store(stored + 8,",
            "tl.store(stored + 4,",
            Uninitialised,
            "of out were never stored",
        ),
        Mutant(
            "into its input",
            "torch.empty_like(pages)",
            "pages",
            ContractError,
            "out must be apart from pages",
            "api",
        ),
    ],
    SWAP: [
        Mutant(
            "nothing swapped",
            "first, second, third = red, green, blue",
            "first, second, third = blue, green, red",
            DIFFERS,
        ),
        Mutant(
            "rest in one channel",
            "tl.store(out_ptr + pixel * 3 + 2, third",
            "tl.store(out_ptr + pixel * 3 + 1, third",
            Uninitialised,
            "of out were never stored",
        ),
    ],
}
