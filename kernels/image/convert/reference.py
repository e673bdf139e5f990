"""The specification: OpenCV's fixed-point arithmetic on uint8, full range, in integers.

grey    (9798 R + 19235 G + 3735 B + 2^14) >> 15, `cv2.COLOR_BGR2GRAY` (BT.601)
Y       (4899 R + 9617 G + 1868 B + 2^13) >> 14
Cr, Cb  clamped ((11682 (R - Y) + 128 * 2^14 + 2^13) >> 14), and 9241 (B - Y) likewise,
        `cv2.COLOR_BGR2YCrCb`; the shift rounds down, also below zero

Y and grey differ: their weights are rounded to 14 and to 15 bits.
"""

import torch

from kernels.contract import Contract, Count, Output, Tensor

GREY_CONTRACT = Contract(
    "grey",
    pages=Tensor("3*pixels", torch.uint8, wide_index=True),
    out=Output("pixels", like="pages"),
    pixels=Count("pixels"),
)
COLOUR_CONTRACT = Contract(
    "colour",
    pages=Tensor("3*pixels", torch.uint8, wide_index=True),
    out=Output("3*pixels", like="pages", wide_index=True),
    pixels=Count("pixels"),
)


def grey(pages_bgr: torch.Tensor) -> torch.Tensor:
    """pages_bgr [batch, height, width, 3] uint8 -> [batch, height, width] uint8."""
    blue, green, red = pages_bgr.int().unbind(-1)
    return ((9798 * red + 19235 * green + 3735 * blue + (1 << 14)) >> 15).to(torch.uint8)


def swap_channels(pages: torch.Tensor) -> torch.Tensor:
    """BGR to RGB, or RGB to BGR: [batch, height, width, 3] uint8."""
    return pages.flip(-1)


def to_ycrcb(pages_bgr: torch.Tensor) -> torch.Tensor:
    """pages_bgr [batch, height, width, 3] uint8 -> Y, Cr, Cb in the same shape."""
    blue, green, red = pages_bgr.int().unbind(-1)
    luma = (4899 * red + 9617 * green + 1868 * blue + (1 << 13)) >> 14
    middle = (128 << 14) + (1 << 13)
    cr = (11682 * (red - luma) + middle) >> 14
    cb = (9241 * (blue - luma) + middle) >> 14
    return torch.stack([luma, cr, cb], dim=-1).clamp_(0, 255).to(torch.uint8)
