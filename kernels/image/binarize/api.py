"""Entry point of the op."""

from functools import lru_cache

import torch

from kernels.errors import ContractError
from kernels.image.binarize import reference
from kernels.image.pages import aligned, require_pages
from kernels.launch import Launcher, cdiv, runs_kernels

# The usual window has a kernel of its own.
WINDOW = 25
META = {"BLOCK": 32, "QUADS": WINDOW // 4, "ROWS": 64, "num_warps": 1}
ANY_META = {"BLOCK": 512, "ROWS": 128, "num_warps": 4}
METAS, ANY_METAS = (META,), (ANY_META,)
_launch = Launcher(reference.CONTRACT, "kernels.image.binarize.kernel:sauvola_kernel")
_launch_any = Launcher(reference.ANY_CONTRACT, "kernels.image.binarize.kernel:sauvola_any_kernel")


def sauvola(pages: torch.Tensor, window: int = 25, k: float = 0.2) -> torch.Tensor:
    """pages [batch, height, width] uint8 -> 255 where a pixel is paper, 0 where it is ink.

    window: odd, at most 181 pixels. k: from 0 to 1, of at most three decimals: the kernel takes it
    as a whole number of thousandths, of which float64 makes the same k. Raises ContractError.
    """
    require_pages("sauvola", pages)
    if not 1 <= window <= reference.MAX_WINDOW or window % 2 == 0:
        expected = f"odd, from 1 to {reference.MAX_WINDOW}"
        raise ContractError("sauvola", "window", expected, f"{window}")
    permille = round(k * 1000) if 0 <= k <= 1 else -1
    if permille / 1000 != k:
        raise ContractError("sauvola", "k", "from 0 to 1, of at most three decimals", f"{k}")
    if pages.numel() == 0:
        return pages.clone()
    if not runs_kernels(pages):
        return reference.sauvola(pages, window, k)
    out = torch.empty_like(pages)
    batch, height, width = pages.shape
    arguments = (
        aligned(pages),
        _row_starts(height, width, window, pages.device),
        _columns(width, window, pages.device),
        out,
        height,
        width,
        width + window - 1,
    )
    if window == WINDOW:
        columns = 4 * META["BLOCK"] - window + 1
        grid = (batch, cdiv(width, columns), cdiv(height, META["ROWS"]))
        _launch(grid, *arguments, permille, **META)
    else:
        columns = ANY_META["BLOCK"] - window + 1
        grid = (batch, cdiv(width, columns), cdiv(height, ANY_META["ROWS"]))
        _launch_any(grid, *arguments, window, permille, **ANY_META)
    return out


# Made and copied once: the copies have ended when these return, whatever stream reads them.
@lru_cache(maxsize=256)
def _row_starts(height: int, width: int, window: int, device: torch.device) -> torch.Tensor:
    """And of one row more: after the last window one enters that no window has."""
    rows = reference.mirrored(height, window).long()
    return (torch.cat([rows, rows[-1:]]) * width).to(device)


@lru_cache(maxsize=256)
def _columns(width: int, window: int, device: torch.device) -> torch.Tensor:
    return reference.mirrored(width, window).to(device)
