"""Entry points of the op."""

import torch

from kernels.image.convert import reference
from kernels.image.pages import aligned, require_pages
from kernels.launch import Launcher, cdiv, runs_kernels

GREY_METAS = ({"BLOCK": 128, "num_warps": 4},)
COLOUR_METAS = tuple({"BLOCK": 128, "TO_YCRCB": each, "num_warps": 4} for each in (0, 1))
PIXELS = 16  # of a row of BLOCK
_grey = Launcher(reference.GREY_CONTRACT, "kernels.image.convert.kernel:grey_kernel")
_colour = Launcher(reference.COLOUR_CONTRACT, "kernels.image.convert.kernel:colour_kernel")


def grey(pages_bgr: torch.Tensor) -> torch.Tensor:
    """pages_bgr [batch, height, width, 3] uint8, contiguous -> [batch, height, width] uint8.

    Raises ContractError for other pages.
    """
    require_pages("grey", pages_bgr, 3)
    if not runs_kernels(pages_bgr):
        return reference.grey(pages_bgr)
    out = pages_bgr.new_empty(pages_bgr.shape[:-1])
    (meta,) = GREY_METAS
    num_pixels = out.numel()
    grid = _grid(num_pixels, meta["BLOCK"])
    _grey(grid, aligned(pages_bgr).view(-1), out.view(-1), num_pixels, **meta)
    return out


def swap_channels(pages: torch.Tensor) -> torch.Tensor:
    """BGR to RGB, or RGB to BGR: [batch, height, width, 3] uint8, contiguous.

    Raises ContractError for other pages.
    """
    require_pages("swap_channels", pages, 3)
    return _recoloured(pages, 0) if runs_kernels(pages) else reference.swap_channels(pages)


def to_ycrcb(pages_bgr: torch.Tensor) -> torch.Tensor:
    """pages_bgr [batch, height, width, 3] uint8, contiguous -> Y, Cr, Cb in the same shape.

    Raises ContractError for other pages.
    """
    require_pages("to_ycrcb", pages_bgr, 3)
    return _recoloured(pages_bgr, 1) if runs_kernels(pages_bgr) else reference.to_ycrcb(pages_bgr)


def _recoloured(pages: torch.Tensor, to_ycrcb: int) -> torch.Tensor:
    out = torch.empty_like(pages)
    meta = COLOUR_METAS[to_ycrcb]
    num_pixels = pages.numel() // 3
    grid = _grid(num_pixels, meta["BLOCK"])
    _colour(grid, aligned(pages).view(-1), out.view(-1), num_pixels, **meta)
    return out


def _grid(num_pixels: int, block: int) -> tuple[int]:
    """The first program also has the pixels that fill no row; without pixels there is none."""
    return (max(min(num_pixels, 1), cdiv(num_pixels // PIXELS, block)),)
