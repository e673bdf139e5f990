"""Mutants of image/lines."""

import torch

from kernels.errors import ContractError, DoubleStore, OutOfBounds, Uninitialised
from kernels.image.lines import reference
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op


def inked(*shape: int, share: float = 0.7) -> torch.Tensor:
    is_ink = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < share
    return torch.where(is_ink, 127, 128).to(torch.uint8)


ROWS = Op(
    "image/lines",
    "line_runs",
    reference.line_runs,
    {
        "odd": lambda: (inked(2, 5, 11), 3, 2),
        "two blocks": lambda: (inked(1, 3, 290, share=0.99), 60, 2),
        "longer than the page": lambda: (inked(1, 2, 4), 9, 2),
    },
)
COLUMNS = Op(
    "image/lines",
    "line_runs",
    reference.line_runs,
    {
        "odd": lambda: (inked(2, 11, 5), 3, 1),
        "two segments, two blocks": lambda: (inked(1, 132, 130, share=0.95), 9, 1),
    },
)
PROJECTIONS = Op(
    "image/lines",
    "projections",
    reference.projections,
    {"odd": lambda: (inked(2, 5, 11),), "two blocks": lambda: (inked(1, 18, 300),)},
)
IN_ROWS, IN_COLUMNS, IN_PROJECTIONS = (
    "row_windows_kernel",
    "column_windows_kernel",
    "projections_kernel",
)
MUTANTS = {
    ROWS: [
        Mutant(
            "rows past the last",
            "is_row = y < height",
            "is_row = y <= height",
            DoubleStore,
            "store of out",
        ),
        Mutant(
            "entering past the last",
            "(enters < width)",
            "(enters <= width)",
            OutOfBounds,
            "load of pages",
        ),
        Mutant(
            "leaving before the first",
            "(leaves >= 0)",
            "(leaves >= -1)",
            OutOfBounds,
            "before its first",
        ),
        Mutant(
            "stored before the first",
            "mask=is_row & (x >= 0) & (x < width)",
            "mask=is_row & (x < width)",
            OutOfBounds,
            "before its first",
        ),
        Mutant("a longer window", "x + ahead - length", "x + ahead - length - 1", DIFFERS),
        Mutant(
            "counts not carried",
            "count += tl.sum(change, 1, keep_dims=True)",
            "count += 0",
            DIFFERS,
        ),
        Mutant("ink is up to 128", "< 128)", "<= 128)", DIFFERS),
        Mutant(
            "rows of the width",
            "* height + y) * width",
            "* height + y) * height",
            DoubleStore,
            "store of out",
            within=IN_ROWS,
        ),
        Mutant(
            "one page for all",
            "(tl.program_id(0).to(tl.int64) * height + y) * width",
            "y.to(tl.int64) * width",
            DoubleStore,
            "program (0, 0, 0) stored",
            within=IN_ROWS,
        ),
        Mutant("not ahead", "ahead=length - 1", "ahead=length", DIFFERS, "", "api"),
        Mutant(
            "half of the rows",
            'cdiv(height, ROWS_META["ROWS"])',
            'cdiv(height, 2 * ROWS_META["ROWS"])',
            Uninitialised,
            "of out were never stored",
            "api",
        ),
        Mutant(
            "a value of two bytes",
            "need=1, value=255",
            "need=1, value=256",
            ContractError,
            "value must be from 0 to 255, came 256",
            "api",
        ),
    ],
    COLUMNS: [
        Mutant(
            "columns past the last",
            "is_column = x < width",
            "is_column = x <= width",
            DoubleStore,
            "store of out",
        ),
        Mutant(
            "rows past the last",
            "is_column & (enters < height)",
            "is_column & (enters <= height)",
            OutOfBounds,
            "load of pages",
        ),
        Mutant(
            "segments over each other",
            "tl.minimum(top + segment, height)",
            "tl.minimum(top + segment + 1, height)",
            DoubleStore,
            "store of out",
        ),
        Mutant(
            "a window that begins late",
            "top + ahead - length + 1",
            "top + ahead - length + 2",
            DIFFERS,
        ),
        Mutant("leaves never", "count -= ink(", "count -= 0 * ink(", DIFFERS),
        Mutant(
            "height for width",
            "page + enters.to(tl.int64) * width",
            "page + enters.to(tl.int64) * height",
            OutOfBounds,
            "load of pages",
        ),
        Mutant(
            "half of the segments",
            "cdiv(height, segment))",
            "cdiv(height, 2 * segment))",
            Uninitialised,
            "of out were never stored",
            "api",
        ),
    ],
    PROJECTIONS: [
        Mutant(
            "stored, not added",
            "tl.atomic_add(columns_ptr",
            "tl.store(columns_ptr",
            DoubleStore,
            "store of columns",
        ),
        Mutant(
            "added past the last",
            "mask=x < width)",
            "mask=x <= width)",
            OutOfBounds,
            "atomic of columns",
        ),
        Mutant(
            "rows past the last",
            "in_row, mask=y < height",
            "in_row, mask=y <= height",
            OutOfBounds,
            "store of rows",
        ),
        Mutant(
            "rows without the last",
            "in_row, mask=y < height",
            "in_row, mask=y < height - 1",
            Uninitialised,
            "of rows were never stored",
        ),
        Mutant(
            "the last block alone", "in_row += tl.sum(dark, 1)", "in_row = tl.sum(dark, 1)", DIFFERS
        ),
        Mutant(
            "counts of 64 bits",
            "rows = torch.empty(batch, height, dtype=torch.int32",
            "rows = torch.empty(batch, height, dtype=torch.int64",
            ContractError,
            "rows must be int32, came int64",
            "api",
        ),
        Mutant(
            "columns that begin as they are",
            "columns = torch.zeros(batch, width,",
            "columns = torch.full((batch, width), 1,",
            DIFFERS,
            "",
            "api",
        ),
    ],
}
