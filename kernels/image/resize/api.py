"""Entry point of the op."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from kernels.errors import ContractError
from kernels.image.pages import aligned, require_pages
from kernels.image.resize import reference
from kernels.launch import Launcher, cdiv, runs_kernels

METAS = tuple(
    {"BLOCK": 512, "BY_WORDS": each, "RAISED": 3, "ROWS": 4, "num_warps": 4} for each in (0, 1)
)
WORD = 4  # bytes
_launch = Launcher(reference.CONTRACT, "kernels.image.resize.kernel:resize_normalise_kernel")


def resize_normalise(
    pages_bgr: torch.Tensor,
    height: int,
    width: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """pages_bgr [batch, height, width, 3] uint8 -> (x / 255 - mean) / std, [batch, 3, height,
    width] of dtype (float16 or float32), red first; mean and std are of red, green, blue.

    Bilinear, not antialiased: see the reference. Raises ContractError for other pages, sizes
    below 1 and a std that is not above 0.
    """
    require_pages("resize_normalise", pages_bgr, 3)
    _require_settings(height, width, mean, std, dtype)
    batch, source_height, source_width, _ = pages_bgr.shape
    if batch and not source_height * source_width:
        expected, came = "pages of at least one pixel", f"{list(pages_bgr.shape)}"
        raise ContractError("resize_normalise", "pages", expected, came)
    if not runs_kernels(pages_bgr):
        return reference.resize_normalise(pages_bgr, height, width, mean, std, dtype)
    out = torch.empty(batch, 3, height, width, dtype=dtype, device=pages_bgr.device)
    is_whole_words = pages_bgr.numel() % WORD == 0 and source_width > 1
    meta = METAS[is_whole_words]
    _launch(
        (batch, cdiv(width, meta["BLOCK"]), cdiv(height, meta["ROWS"])),
        aligned(pages_bgr),
        *_taps(source_height, height, pages_bgr.device),
        *_taps(source_width, width, pages_bgr.device),
        out,
        source_height,
        source_width,
        height,
        width,
        *(1 / (255 * each) for each in std),
        *(-one / other for one, other in zip(mean, std, strict=True)),
        **meta,
    )
    return out


@lru_cache(maxsize=256)
def _taps(
    num_source: int, num_target: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Made and copied once: the copy has ended when this returns, whatever stream reads it."""
    index, weight = reference.taps(num_source, num_target)
    return index.to(device), weight.to(device)


def _require_settings(
    height: int, width: int, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> None:
    for name, each in (("height", height), ("width", width)):
        if each < 1:
            raise ContractError("resize_normalise", name, "at least 1", f"{each}")
    for name, channels in (("mean", mean), ("std", std)):
        if len(channels) != 3:
            came = f"{len(channels)} numbers"
            raise ContractError("resize_normalise", name, "of red, green, blue", came)
    if min(std) <= 0:
        raise ContractError("resize_normalise", "std", "above 0", f"{tuple(std)}")
    dtypes = reference.CONTRACT.tensors["out"].dtypes
    if dtype not in dtypes:
        raise ContractError("resize_normalise", "dtype", f"one of {dtypes}", f"{dtype}")
