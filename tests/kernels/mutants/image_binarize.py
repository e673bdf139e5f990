"""Mutants of image/binarize."""

import torch

from kernels.errors import ContractError, DoubleStore, OutOfBounds, Uninitialised
from kernels.image.binarize import reference
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op


def noise(*shape: int) -> torch.Tensor:
    levels = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    return levels.to(torch.uint8)


ANY = Op(
    "image/binarize",
    "sauvola",
    reference.sauvola,
    {
        "odd": lambda: (noise(2, 7, 11), 5, 0.2),
        "smaller than the window": lambda: (noise(1, 2, 3), 9, 0.5),
        "two blocks": lambda: (noise(1, 1, 520), 3, 0.2),
        "white": lambda: (torch.full((1, 4, 5), 255, dtype=torch.uint8), 3, 0.0),
        "two strips": lambda: (noise(1, 129, 2), 1, 0.2),
    },
)
USUAL = Op(
    "image/binarize",
    "sauvola",
    reference.sauvola,
    {
        "odd": lambda: (noise(2, 2, 107), 25, 0.2),
        "inner columns": lambda: (noise(1, 1, 225), 25, 0.2),
    },
)
IN_ANY, IN_USUAL = "sauvola_any_kernel", "sauvola_kernel"
MUTANTS = {
    ANY: [
        Mutant(
            "columns past the last",
            "& (x < width)",
            "& (x <= width)",
            DoubleStore,
            "store of out",
            within=IN_ANY,
        ),
        Mutant(
            "columns of an unfilled window",
            "(place >= window - 1)",
            "(place >= window - 2)",
            OutOfBounds,
            "before its first",
            within=IN_ANY,
        ),
        Mutant(
            "a column of the padding too far",
            "tl.minimum(padded, padded_width - 1)",
            "padded",
            OutOfBounds,
            "load of columns",
            within=IN_ANY,
        ),
        Mutant(
            "a leaving column before the first",
            "+ leaving, mask=has_leaving, other=0)",
            "+ leaving)",
            OutOfBounds,
            "load of columns",
            within=IN_ANY,
        ),
        Mutant(
            "store without a mask",
            "value.to(tl.uint8), mask=is_stored",
            "value.to(tl.uint8)",
            OutOfBounds,
            "store of out",
            within=IN_ANY,
        ),
        Mutant(
            "leaves one late",
            "has_leaving = place >= window",
            "has_leaving = place > window",
            DIFFERS,
            within=IN_ANY,
        ),
        Mutant(
            "a row beyond the padding",
            "starts_ptr + y + window)",
            "starts_ptr + y + window + 1)",
            OutOfBounds,
            "load of starts",
            within=IN_ANY,
        ),
        Mutant(
            "a strip of the next",
            "top = tl.program_id(2) * ROWS",
            "top = tl.program_id(2) * (ROWS - 1)",
            DoubleStore,
            "store of out",
            within=IN_ANY,
        ),
        Mutant(
            "rows past the last",
            "tl.minimum(top + ROWS, height)",
            "top + ROWS",
            OutOfBounds,
            "",
            within=IN_ANY,
        ),
        Mutant(
            "one page for all",
            "page_ptr = pages_ptr + page",
            "page_ptr = pages_ptr",
            DIFFERS,
            within=IN_ANY,
        ),
        Mutant(
            "every page in the first",
            "tl.store(out_ptr + page + middle",
            "tl.store(out_ptr + middle",
            DoubleStore,
            "program (0, 0, 0) stored",
            within=IN_ANY,
        ),
        Mutant(
            "rows of the height",
            "tl.cast(y, tl.int64) * width + x",
            "tl.cast(y, tl.int64) * height + x",
            Uninitialised,
            within=IN_ANY,
        ),
        Mutant(
            "squares for levels",
            "s, q = tl.cumsum(levels, 0), tl.cumsum(squares, 0)",
            "q, s = tl.cumsum(levels, 0), tl.cumsum(squares, 0)",
            DIFFERS,
            within=IN_ANY,
        ),
        Mutant(
            "not above the threshold",
            "pixel.to(tl.float64) > mean",
            "pixel.to(tl.float64) >= mean",
            DIFFERS,
        ),
        Mutant("half the deviation", "(count * count * 128)", "(count * count * 256)", DIFFERS),
        Mutant(
            "starts in pixels of a row", "[-1:]]) * width", "[-1:]]) * height", DIFFERS, "", "api"
        ),
        Mutant(
            "starts of 32 bits",
            "reference.mirrored(height, window).long()",
            "reference.mirrored(height, window)",
            ContractError,
            "starts must be int64, came int32",
            "api",
        ),
        Mutant(
            "half of the blocks",
            'columns = ANY_META["BLOCK"] - window + 1',
            'columns = 2 * ANY_META["BLOCK"]',
            Uninitialised,
            "of out were never stored",
            "api",
        ),
        Mutant(
            "sides swapped",
            "        height,\n        width,\n        width + window - 1,",
            "        width,\n        height,\n        width + window - 1,",
            ContractError,
            "height must be 7, the size height, came 11",
            "api",
        ),
        Mutant(
            "into its input",
            "out = torch.empty_like(pages)",
            "out = pages",
            ContractError,
            "out must be apart from pages",
            "api",
        ),
    ],
    USUAL: [
        Mutant(
            "columns past the last",
            "is_stored & (x[3] < width)",
            "is_stored & (x[3] <= width)",
            DoubleStore,
            "store of out",
            within=IN_USUAL,
        ),
        Mutant(
            "inner where it is not",
            "start + 4 * BLOCK <= width + 2 * QUADS",
            "start <= width + 2 * QUADS",
            DoubleStore,
            "store of out",
            within=IN_USUAL,
        ),
        Mutant(
            "an inner half window",
            "four_columns(padded - 2 * QUADS)",
            "four_columns(padded - 4 * QUADS)",
            DIFFERS,
            within=IN_USUAL,
        ),
        Mutant(
            "a lane too near",
            "lanes_before(c2, QUADS, BLOCK)",
            "lanes_before(c2, QUADS - 1, BLOCK)",
            DIFFERS,
        ),
        Mutant(
            "columns of a program",
            "(4 * (BLOCK - QUADS))",
            "(4 * BLOCK)",
            Uninitialised,
            "of out were never stored",
            within=IN_USUAL,
        ),
        Mutant(
            "a third twice",
            "tl.store(stored + 2, value[2]",
            "tl.store(stored + 1, value[2]",
            Uninitialised,
            "of out were never stored",
        ),
    ],
}
