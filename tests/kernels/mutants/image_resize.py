"""Mutants of image/resize."""

import torch

from kernels.errors import ContractError, DoubleStore, OutOfBounds, Uninitialised
from kernels.image.resize import reference
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def resized(
    source: tuple[int, int, int], height: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple:
    noise = torch.randint(0, 256, (*source, 3), generator=torch.Generator().manual_seed(0))
    return noise.to(torch.uint8), height, width, MEAN, STD, dtype


OP = Op(
    "image/resize",
    "resize_normalise",
    reference.resize_normalise,
    {
        "unequal ratios": lambda: resized((2, 9, 12), 6, 11),
        "odd, larger": lambda: resized((1, 5, 7), 13, 11),
        "two blocks": lambda: resized((1, 6, 4), 5, 300),
        "one pixel": lambda: resized((3, 1, 1), 2, 3),
        "one row": lambda: resized((2, 1, 9), 3, 4),
        "float16": lambda: resized((1, 9, 4), 4, 9, torch.float16),
    },
    rtol=1e-3,
    atol=2e-5,
)
ROW_TAPS = "*_taps(source_height, height, pages_bgr.device),"
COLUMN_TAPS = "*_taps(source_width, width, pages_bgr.device),"
MUTANTS = {
    OP: [
        Mutant(
            "columns past the last",
            "is_column = x < width",
            "is_column = x <= width",
            OutOfBounds,
            "load of columns",
        ),
        Mutant("rows past the last", "+ y < height)", "+ y <= height)", DoubleStore, "of out"),
        Mutant(
            "taps past the last",
            "tap = tl.minimum(y, height - 1)",
            "tap = y",
            OutOfBounds,
            "load of rows",
        ),
        Mutant(
            "a row below the last",
            "(row_bytes * tl.minimum(source_height - 1, 1))",
            "(row_bytes + 0)",
            OutOfBounds,
            "load of pages",
        ),
        Mutant(
            "a pixel beside the last",
            "3 * tl.minimum(source_width - 1, 1)",
            "3",
            OutOfBounds,
            "load of pages",
        ),
        Mutant(
            "a word too far", "mask=skipped == 3", "mask=skipped >= 2", OutOfBounds, "load of pages"
        ),
        Mutant("weights swapped", "tl.fma(right, across,", "tl.fma(down, across,", DIFFERS),
        Mutant(
            "height and width swapped",
            "row_bytes = 3 * source_width",
            "row_bytes = 3 * source_height",
            DIFFERS,
        ),
        Mutant(
            "a plane of squares",
            "plane = height.to(tl.int64) * width",
            "plane = width.to(tl.int64) * width",
            OutOfBounds,
            "store of out",
        ),
        Mutant(
            "planes over each other",
            "stored + 2 * plane",
            "stored + plane",
            Uninitialised,
            "of out were never stored",
        ),
        Mutant(
            "blue first", "tl.store(stored, tl.fma(red,", "tl.store(stored, tl.fma(blue,", DIFFERS
        ),
        Mutant(
            "scales swapped",
            "*(1 / (255 * each) for each in std)",
            "*(1 / (255 * each) for each in std[::-1])",
            DIFFERS,
            "",
            "api",
        ),
        Mutant(
            "taps of the other axis",
            "*_taps(source_height, height, pages_bgr.device)",
            "*_taps(source_width, height, pages_bgr.device)",
            OutOfBounds,
            "load of pages",
            "api",
        ),
        Mutant(
            "taps swapped",
            f"{ROW_TAPS}\n        {COLUMN_TAPS}",
            f"{COLUMN_TAPS}\n        {ROW_TAPS}",
            ContractError,
            "out must be [batch 3 height width]",
            "api",
        ),
        Mutant(
            "a row a program",
            'cdiv(height, meta["ROWS"])',
            'cdiv(height, 2 * meta["ROWS"])',
            Uninitialised,
            "of out were never stored",
            "api",
        ),
        Mutant(
            "weights of 64 bits",
            "index.to(device), weight.to(device)",
            "index.to(device), weight.double().to(device)",
            ContractError,
            "row_weights must be float32, came float64",
            "api",
        ),
    ],
}
