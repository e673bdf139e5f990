"""Entry points of the op."""

import math

import torch

from kernels.errors import ContractError
from kernels.image.deskew import reference
from kernels.image.pages import aligned, require_pages
from kernels.launch import Launcher, cdiv, runs_kernels

STRIPS_META = {"BLOCK": 16, "ROWS": 64, "num_warps": 4}
PROFILES_META = {"BLOCK": 512, "num_warps": 4}
TURN_META = {"BLOCK": 128, "ROWS": 8, "num_warps": 4}
STRIPS_METAS, PROFILES_METAS, TURN_METAS = (STRIPS_META,), (PROFILES_META,), (TURN_META,)
COARSE_STEP = 0.25  # degrees: lines of small print still overlap their neighbours' angles
MAX_DEGREES = 45
_KERNELS = "kernels.image.deskew.kernel"
_strips = Launcher(reference.STRIPS_CONTRACT, f"{_KERNELS}:strips_kernel")
_profiles = Launcher(reference.PROFILES_CONTRACT, f"{_KERNELS}:profiles_kernel")
_turn = Launcher(reference.TURN_CONTRACT, f"{_KERNELS}:turn_kernel")


def estimate_skew(
    pages: torch.Tensor, max_degrees: float = 5.0, step: float = 0.05
) -> torch.Tensor:
    """pages [batch, height, width] uint8, ink below 128 -> by how many degrees each was turned to
    the left, float64 [batch]: multiples of `step` about the best multiple of a coarser one.

    A page without ink was not turned. Raises ContractError.
    """
    require_pages("estimate_skew", pages)
    if not 0 < max_degrees <= MAX_DEGREES:
        expected = f"above 0, at most {MAX_DEGREES}"
        raise ContractError("estimate_skew", "max_degrees", expected, f"{max_degrees}")
    if not 0.001 <= step <= COARSE_STEP:
        expected = f"from 0.001 to {COARSE_STEP}"
        raise ContractError("estimate_skew", "step", expected, f"{step}")
    found = torch.zeros(len(pages), dtype=torch.float64, device=pages.device)
    if pages.numel() == 0:
        return found
    strips = strips_of(pages)
    for reach, each in ((max_degrees, COARSE_STEP), (COARSE_STEP, step)):
        steps = math.ceil(reach / each)
        offsets = torch.arange(-steps, steps + 1, dtype=torch.float64, device=pages.device) * each
        degrees = found[:, None] + offsets
        profiles = profiles_of(strips, reference.slopes_of(degrees), pages.shape[2])
        found = _most_uneven(profiles, degrees)
    return found


def strips_of(pages: torch.Tensor) -> torch.Tensor:
    """pages [batch, height, width] uint8 -> the ink of each 8 columns and row, [batch, strips,
    height] uint8."""
    if not runs_kernels(pages):
        return reference.strips(pages)
    batch, height, width = pages.shape
    num_strips = cdiv(width, reference.STRIP)
    out = pages.new_empty(batch, num_strips, height)
    grid = (batch, cdiv(height, STRIPS_META["ROWS"]), cdiv(num_strips, STRIPS_META["BLOCK"]))
    _strips(grid, aligned(pages), out, height, width, num_strips, **STRIPS_META)
    return out


def profiles_of(strips: torch.Tensor, slopes: torch.Tensor, width: int) -> torch.Tensor:
    """strips [batch, strips, height], slopes [batch, angles] -> the ink of the rows at each angle,
    int32 [batch, angles, height]. width: of the pages, of at least one pixel."""
    if not runs_kernels(strips):
        return reference.profiles(strips, slopes, width)
    batch, num_strips, height = strips.shape
    num_angles = slopes.shape[1]
    out = torch.empty(batch, num_angles, height, dtype=torch.int32, device=strips.device)
    grid = (batch, num_angles, cdiv(height, PROFILES_META["BLOCK"]))
    _profiles(grid, strips, slopes, out, num_strips, num_angles, height, width, **PROFILES_META)
    return out


def deskew(pages: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    """pages [batch, height, width] uint8, turned to the left by degrees [batch] -> turned back, in
    the same shape; what was beyond the page is 255. Raises ContractError."""
    require_pages("deskew", pages)
    if degrees.shape != pages.shape[:1] or not degrees.is_floating_point():
        came = f"{list(degrees.shape)} {degrees.dtype}"
        raise ContractError("deskew", "degrees", f"floats [{len(pages)}]", came)
    rotation = reference.rotation_of(degrees)
    if not runs_kernels(pages):
        return reference.turn(pages, rotation) if pages.numel() else pages.clone()
    out = torch.empty_like(pages)
    batch, height, width = pages.shape
    grid = (batch, cdiv(height, TURN_META["ROWS"]), cdiv(width, TURN_META["BLOCK"]))
    _turn(grid, aligned(pages), rotation, out, height, width, **TURN_META)
    return out


def _most_uneven(profiles: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    """Of the best angles the one nearest to 0, [batch]."""
    unevenness = profiles.double().diff(dim=2).square().sum(2)
    is_best = unevenness == unevenness.amax(1, keepdim=True)
    nearest = torch.where(is_best, degrees.abs(), math.inf).argmin(1, keepdim=True)
    return degrees.gather(1, nearest)[:, 0]
