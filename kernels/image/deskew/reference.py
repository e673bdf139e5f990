"""The specification. Degrees count as OpenCV's do: a page turned by them is turned to the left.

Skew: ink is what is darker than 128. Columns are taken in strips of 8, each strip moved up or down
by the whole rows, rounded half up, that its middle is off the line of an angle; the ink of the rows
is then the angle's profile, in exact integers. Text gives the most uneven profile at its own angle:
the sum of squared differences of neighbouring rows is greatest.

Turning: each pixel is looked up where it lay, bilinear between four pixels, about the middle of the
page; beyond the page all is paper, 255. float32, each step rounded; levels are rounded half up.
"""

import torch

from kernels.contract import Contract, Count, Output, Scalar, Tensor

PAPER = 128  # and above
STRIP = 8  # columns; at 5 degrees its ends lie a third of a row off

STRIPS_CONTRACT = Contract(
    "strips",
    pages=Tensor("batch height width", torch.uint8, wide_index=True),
    out=Output("batch strips height", like="pages", wide_index=True),
    height=Count("height"),
    width=Count("width"),
    num_strips=Count("strips"),
)
PROFILES_CONTRACT = Contract(
    "profiles",
    strips=Tensor("batch strips height", torch.uint8, wide_index=True),
    slopes=Tensor("batch angles", torch.float32),
    out=Output("batch angles height", torch.int32, wide_index=True),
    num_strips=Count("strips"),
    num_angles=Count("angles"),
    height=Count("height"),
    width=Scalar(int, 1),
)
TURN_CONTRACT = Contract(
    "turn",
    pages=Tensor("batch height width", torch.uint8, wide_index=True),
    rotation=Tensor("batch 2", torch.float32),
    out=Output("batch height width", like="pages", wide_index=True),
    height=Count("height"),
    width=Count("width"),
)


def slopes_of(degrees: torch.Tensor) -> torch.Tensor:
    """Rows down for each column to the right, float32: a line of a page turned left goes up."""
    slopes: torch.Tensor = -torch.deg2rad(degrees.double()).tan().float()
    return slopes


def rotation_of(degrees: torch.Tensor) -> torch.Tensor:
    """[batch] -> cosine and sine, float32 [batch, 2]."""
    radians: torch.Tensor = torch.deg2rad(degrees.double())
    rotation: torch.Tensor = torch.stack([radians.cos(), radians.sin()], dim=1).float()
    return rotation


def strips(pages: torch.Tensor) -> torch.Tensor:
    """pages [batch, height, width] uint8 -> the ink of each strip and row, [batch, strips, height]
    uint8."""
    ink = torch.nn.functional.pad(pages < PAPER, (0, -pages.shape[2] % STRIP))
    counts: torch.Tensor = ink.unflatten(2, (-1, STRIP)).sum(3).transpose(1, 2)
    return counts.to(torch.uint8).contiguous()


def profiles(strips: torch.Tensor, slopes: torch.Tensor, width: int) -> torch.Tensor:
    """strips [batch, strips, height], slopes [batch, angles] -> the ink of the rows at each angle,
    int32 [batch, angles, height]."""
    batch, num_strips, height = strips.shape
    right = torch.arange(num_strips, device=strips.device).float() * STRIP
    right += (STRIP - 1) / 2 - (width - 1) / 2
    down = (slopes[:, :, None] * right + 0.5).floor().long()  # [batch, angles, strips]
    out = torch.zeros(batch, slopes.shape[1], height, dtype=torch.int32, device=strips.device)
    rows = torch.arange(height, device=strips.device)
    for strip in range(num_strips):
        source = rows + down[:, :, strip, None]
        inside = (source >= 0) & (source < height)
        ink = strips[:, strip, None].expand_as(out).gather(2, source.clamp_(0, height - 1))
        out += torch.where(inside, ink, 0)
    return out


def turn(pages: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """pages [batch, height, width] uint8, rotation [batch, 2] -> turned back, likewise."""
    batch, height, width = pages.shape
    y = torch.arange(height, device=pages.device).float()[:, None] - (height - 1) / 2
    x = torch.arange(width, device=pages.device).float() - (width - 1) / 2
    cosine, sine = rotation.view(batch, 2, 1, 1).unbind(1)
    source_x = (x * cosine + y * sine) + (width - 1) / 2
    source_y = (y * cosine - x * sine) + (height - 1) / 2
    left, top = source_x.floor(), source_y.floor()

    def level(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        place = row.clamp(0, height - 1).long() * width + column.clamp(0, width - 1).long()
        found = pages.flatten(1).gather(1, place.flatten(1)).view_as(place)
        return torch.where(inside, found, 255).float()

    right, down = source_x - left, source_y - top
    above, above_right = level(top, left), level(top, left + 1)
    below, below_right = level(top + 1, left), level(top + 1, left + 1)
    upper = above + right * (above_right - above)
    lower = below + right * (below_right - below)
    return (upper + down * (lower - upper) + 0.5).floor().to(torch.uint8)
