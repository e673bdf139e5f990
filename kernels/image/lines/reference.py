"""The specification. Ink is what is darker than 128: 0 in a binarized page.

`line_runs` keeps the pixels that lie in a straight run of at least min_length pixels of ink along
one axis: OpenCV's `MORPH_OPEN` of the ink with a line of min_length, whose border adds no ink.
`projections` counts the ink of each row and column. All integers, so nothing rounds.
"""

import torch

from kernels.contract import Argument, Contract, Count, InOut, Output, Scalar, Tensor

PAPER = 128  # and above
INT32_MAX = 2**31 - 1

_WINDOWS: dict[str, Argument] = {
    "pages": Tensor("batch height width", torch.uint8, wide_index=True),
    "out": Output("batch height width", like="pages", wide_index=True),
    "height": Count("height"),
    "width": Count("width"),
    "length": Scalar(int, 1, INT32_MAX),
    "ahead": Scalar(int, 0, INT32_MAX),
    "need": Scalar(int, 1, INT32_MAX),
    "value": Scalar(int, 0, 255),
}
ROWS_CONTRACT = Contract("row_windows", **_WINDOWS)
COLUMNS_CONTRACT = Contract("column_windows", **_WINDOWS, segment=Scalar(int, 1, INT32_MAX))
PROJECTIONS_CONTRACT = Contract(
    "projections",
    pages=Tensor("batch height width", torch.uint8, wide_index=True),
    rows=Output("batch height", torch.int32),
    columns=InOut("batch width", torch.int32),
    height=Count("height"),
    width=Count("width"),
)


def line_runs(pages: torch.Tensor, min_length: int, axis: int) -> torch.Tensor:
    """pages [batch, height, width] uint8 -> 255 in the runs along axis 1 or 2, 0 elsewhere."""
    ink = (pages < PAPER).transpose(axis, -1)
    place = torch.arange(ink.shape[-1], device=pages.device)
    before = torch.where(ink, -1, place).cummax(-1).values
    after = torch.where(ink, ink.shape[-1], place).flip(-1).cummin(-1).values.flip(-1)
    is_long = ink & (after - before - 1 >= min_length)
    return torch.where(is_long, 255, 0).to(torch.uint8).transpose(axis, -1).contiguous()


def projections(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """pages [batch, height, width] uint8 -> ink of each row [batch, height], of each column
    [batch, width], int32."""
    ink = pages < PAPER
    return ink.sum(2, dtype=torch.int32), ink.sum(1, dtype=torch.int32)
