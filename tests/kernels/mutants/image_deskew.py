"""Mutants of image/deskew."""

import torch

from kernels.errors import ContractError, DoubleStore, OutOfBounds, Uninitialised
from kernels.image.deskew import reference
from tests.kernels.mutants.image_binarize import noise
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op

STRIPS = Op(
    "image/deskew",
    "strips_of",
    reference.strips,
    {"odd": lambda: (noise(2, 5, 21),), "two blocks": lambda: (noise(1, 65, 131),)},
)


def slanted(batch: int, strips: int, height: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    counts = noise(batch, strips, height) % 9
    slopes = torch.linspace(0.4, -0.3, 3 * batch).view(batch, 3)
    return counts, slopes, strips * reference.STRIP - 3


PROFILES = Op(
    "image/deskew",
    "profiles_of",
    reference.profiles,
    {"odd": lambda: slanted(2, 3, 11), "two blocks": lambda: slanted(1, 2, 515)},
)
DESKEW = Op(
    "image/deskew",
    "deskew",
    lambda pages, degrees: reference.turn(pages, reference.rotation_of(degrees)),
    {
        "odd": lambda: (noise(2, 9, 13), torch.tensor([5.0, -30.0])),
        "two blocks": lambda: (noise(1, 3, 130), torch.tensor([0.7])),
    },
)
IN_STRIPS, IN_PROFILES, IN_TURN = "strips_kernel", "profiles_kernel", "turn_kernel"
MUTANTS = {
    STRIPS: [
        Mutant(
            "columns past the last",
            "(x < width)[None, :]",
            "(x <= width)[None, :]",
            OutOfBounds,
            "load of pages",
            within=IN_STRIPS,
        ),
        Mutant(
            "strips past the last",
            "(strip < num_strips)",
            "(strip <= num_strips)",
            OutOfBounds,
            "store of out",
        ),
        Mutant(
            "paper beyond is ink",
            "mask=mask, other=255) < 128",
            "mask=mask, other=0) < 128",
            DIFFERS,
            within=IN_STRIPS,
        ),
        Mutant(
            "strides swapped",
            "(page * num_strips + strip)[None, :] * height + y[:, None]",
            "(page * height + y)[:, None] * num_strips + strip[None, :]",
            DIFFERS,
        ),
        Mutant(
            "rows without their page",
            "at = (page * height + y)[:, None] * width",
            "at = y.to(tl.int64)[:, None] * width",
            DIFFERS,
        ),
        Mutant(
            "columns for strips",
            "(BLOCK * COLUMNS) + tl.arange(0, BLOCK * COLUMNS)",
            "BLOCK + tl.arange(0, BLOCK * COLUMNS)",
            DIFFERS,
        ),
        Mutant(
            "whole strips only",
            "cdiv(width, reference.STRIP)",
            "width // reference.STRIP",
            DIFFERS,
            "",
            "api",
        ),
    ],
    PROFILES: [
        Mutant(
            "a row past the last",
            "(source < height)",
            "(source <= height)",
            OutOfBounds,
            "load of strips",
        ),
        Mutant(
            "rows before the first",
            "inside = (source >= 0) & (source < height)",
            "inside = source < height",
            OutOfBounds,
            "before its first",
        ),
        Mutant("rounded down", "slope * right + 0.5", "slope * right", DIFFERS),
        Mutant(
            "the middle of the strips",
            "middle = (width - 1) * 0.5",
            "middle = width * 0.5",
            DIFFERS,
        ),
        Mutant("the other way", "source = y + tl.floor", "source = y - tl.floor", DIFFERS),
        Mutant(
            "angles of one page",
            "angle = page * num_angles + tl.program_id(1)",
            "angle = page + tl.program_id(1)",
            DoubleStore,
            "store of out",
        ),
        Mutant(
            "rows of one angle",
            "tl.store(out_ptr + angle * height + y, ink, mask=y < height)",
            "tl.store(out_ptr + angle * height + y, ink, mask=y <= height)",
            DoubleStore,
            "store of out",
        ),
        Mutant(
            "an angle left out",
            "grid = (batch, num_angles, ",
            "grid = (batch, num_angles - 1, ",
            Uninitialised,
            "of out were never stored",
            "api",
        ),
        Mutant(
            "slopes in float64",
            "_profiles(grid, strips, slopes,",
            "_profiles(grid, strips, slopes.double(),",
            ContractError,
            "slopes must be float32, came float64",
            "api",
        ),
    ],
    DESKEW: [
        Mutant(
            "a column past the last",
            "(column < width)\n    pointers",
            "(column <= width)\n    pointers",
            DIFFERS,
        ),
        Mutant(
            "a row before the first",
            "mask & (row >= 0)",
            "mask & (row >= -1)",
            OutOfBounds,
            "before its first",
        ),
        Mutant(
            "stored past the last",
            "mask = (row < height) & (column < width)",
            "mask = (row < height) & (column <= width)",
            DoubleStore,
            "",
            within=IN_TURN,
        ),
        Mutant(
            "cosine and sine swapped", "(x * cosine + y * sine)", "(x * sine + y * cosine)", DIFFERS
        ),
        Mutant("weights swapped", "down * (lower - upper)", "right * (lower - upper)", DIFFERS),
        Mutant(
            "rotation of the first page",
            "tl.load(rotation_ptr + page * 2 + 1)",
            "tl.load(rotation_ptr + 1)",
            DIFFERS,
        ),
        Mutant("not rounded", "down * (lower - upper) + 0.5", "down * (lower - upper)", DIFFERS),
        Mutant(
            "not masked",
            "inside = mask & (row >= 0) & (row < height) & (column >= 0) & (column < width)",
            "inside = mask & (row >= 0)",
            OutOfBounds,
            "load of pages",
        ),
        Mutant(
            "sides of the grid swapped",
            'cdiv(height, TURN_META["ROWS"]), cdiv(width, TURN_META["BLOCK"])',
            'cdiv(width, TURN_META["BLOCK"]), cdiv(height, TURN_META["ROWS"])',
            Uninitialised,
            "of out were never stored",
            "api",
        ),
    ],
}
