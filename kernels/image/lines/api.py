"""Entry points of the op."""

import torch

from kernels.errors import ContractError
from kernels.image.lines import reference
from kernels.image.pages import aligned, require_pages
from kernels.launch import Launcher, cdiv, runs_kernels

ROWS_META = {"BLOCK": 256, "ROWS": 4, "num_warps": 4}
COLUMNS_META = {"BLOCK": 128, "num_warps": 1}
PROJECTIONS_META = {"BLOCK": 256, "ROWS": 16, "num_warps": 4}
ROWS_METAS, COLUMNS_METAS, PROJECTIONS_METAS = (ROWS_META,), (COLUMNS_META,), (PROJECTIONS_META,)
MIN_SEGMENT = 128  # rows of a program; not less than a window, which each one fills anew
_KERNELS = "kernels.image.lines.kernel"
_row_windows = Launcher(reference.ROWS_CONTRACT, f"{_KERNELS}:row_windows_kernel")
_column_windows = Launcher(reference.COLUMNS_CONTRACT, f"{_KERNELS}:column_windows_kernel")
_projections = Launcher(reference.PROJECTIONS_CONTRACT, f"{_KERNELS}:projections_kernel")


def line_runs(pages: torch.Tensor, min_length: int, axis: int) -> torch.Tensor:
    """pages [batch, height, width] uint8, ink below 128 -> [batch, height, width] uint8: 255 in
    runs of at least min_length pixels of ink along axis 1 (vertical) or 2 (horizontal), else 0.

    Raises ContractError.
    """
    require_pages("line_runs", pages)
    if axis not in (1, 2):
        raise ContractError("line_runs", "axis", "1 or 2", f"{axis}")
    if min_length < 1:
        raise ContractError("line_runs", "min_length", "at least 1", f"{min_length}")
    if not runs_kernels(pages):
        return reference.line_runs(pages, min_length, axis)
    length = min(min_length, pages.shape[axis] + 1)  # no run is longer: what is kept is the same
    ends = _windows(aligned(pages), axis, length, ahead=0, need=length, value=0)
    return _windows(ends, axis, length, ahead=length - 1, need=1, value=255)


def projections(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """pages [batch, height, width] uint8, ink below 128 -> pixels of ink in each row [batch,
    height] and in each column [batch, width], int32. Raises ContractError."""
    require_pages("projections", pages)
    if not runs_kernels(pages):
        return reference.projections(pages)
    batch, height, width = pages.shape
    rows = torch.empty(batch, height, dtype=torch.int32, device=pages.device)
    columns = torch.zeros(batch, width, dtype=torch.int32, device=pages.device)
    grid = (batch, cdiv(height, PROJECTIONS_META["ROWS"]))
    _projections(grid, aligned(pages), rows, columns, height, width, **PROJECTIONS_META)
    return rows, columns


def _windows(
    pages: torch.Tensor, axis: int, length: int, *, ahead: int, need: int, value: int
) -> torch.Tensor:
    out = torch.empty_like(pages)
    batch, height, width = pages.shape
    arguments = (pages, out, height, width, length, ahead, need, value)
    if axis == 2:
        _row_windows((batch, cdiv(height, ROWS_META["ROWS"])), *arguments, **ROWS_META)
    else:
        segment = max(MIN_SEGMENT, length)
        grid = (batch, cdiv(width, COLUMNS_META["BLOCK"]), cdiv(height, segment))
        _column_windows(grid, *arguments, segment, **COLUMNS_META)
    return out
