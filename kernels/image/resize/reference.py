"""The specification: bilinear between pixel centres, BGR to RGB planes, normalised, in float32.

The centre of target pixel i of m lies at (i + 1/2) n / m - 1/2 among n source pixels; beyond the
first and the last centre the edge pixel goes on. No antialiasing: `cv2.INTER_LINEAR` of float32,
`torch.nn.functional.interpolate` with align_corners=False. Where a page shrinks more than twofold,
pixels between the taps are not seen and a thin line may vanish: shrink by area first. By exactly
two, the taps are the mean of each 2 x 2 pixels, which is the area already.

A tap's index and weight are exact before the weight is rounded to float32. The blend, the scale and
the offset round each step in float32, in no promised order; float16 rounds once more, to nearest
even.
"""

from collections.abc import Sequence

import torch

from kernels.contract import Contract, Count, Output, Scalar, Size, Tensor

CONTRACT = Contract(
    "resize_normalise",
    pages=Tensor("batch source_height source_width 3", torch.uint8, wide_index=True),
    rows=Tensor("height", torch.int32),
    row_weights=Tensor("height", torch.float32),
    columns=Tensor("width", torch.int32),
    column_weights=Tensor("width", torch.float32),
    out=Output("batch 3 height width", (torch.float16, torch.float32), wide_index=True),
    source_height=Count("source_height"),
    source_width=Count("source_width"),
    height=Count("height"),
    width=Size("width"),
    red_scale=Scalar(float),
    green_scale=Scalar(float),
    blue_scale=Scalar(float),
    red_offset=Scalar(float),
    green_offset=Scalar(float),
    blue_offset=Scalar(float),
)


def taps(num_source: int, num_target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each target pixel: the index of its first source pixel, int32 [num_target], at most
    num_source - 2 where there are two, and the weight of the next one, float32 in [0, 1]."""
    twice = torch.arange(num_target).mul_(2).add_(1)
    numerator = twice * num_source - num_target
    numerator.clamp_(0, 2 * num_target * (num_source - 1))
    index = numerator.div(2 * num_target, rounding_mode="floor").clamp_(max=max(num_source - 2, 0))
    weight = (numerator - index * 2 * num_target).double() / (2 * num_target)
    return index.int(), weight.float()


def resize_normalise(
    pages_bgr: torch.Tensor,
    height: int,
    width: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
) -> torch.Tensor:
    """pages_bgr [batch, height, width, 3] uint8 -> (x / 255 - mean) / std, [batch, 3, height,
    width] of dtype, red first; mean and std are of red, green, blue."""
    planes = pages_bgr.permute(0, 3, 1, 2).flip(1).float()
    for axis, num_target in ((2, height), (3, width)):
        num_source = planes.shape[axis]
        index, weight = (each.to(planes.device) for each in taps(num_source, num_target))
        after = (index + 1).clamp_(max=num_source - 1)
        shape = [num_target, 1] if axis == 2 else [num_target]
        first, second = planes.index_select(axis, index), planes.index_select(axis, after)
        planes = first.lerp_(second, weight.view(shape))
    means, stds = (torch.tensor(each, device=planes.device).view(3, 1, 1) for each in (mean, std))
    return planes.div_(255).sub_(means).div_(stds).to(dtype)
