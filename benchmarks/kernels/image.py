"""The image kernels on 64 A4 pages at 200 dpi, random pixels."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Case
from benchmarks.kernels.tune import Knob, grid
from kernels.image.convert import reference as convert_reference
from kernels.image.convert.api import grey
from kernels.image.resize.api import resize_normalise

BATCH, HEIGHT, WIDTH = 64, 2339, 1654
TARGET_HEIGHT, TARGET_WIDTH = 1280, 960
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
PAGES = f"{BATCH} x {HEIGHT} x {WIDTH}"
GREY_BAR_US, RESIZE_BAR_US = 4.6, 6.0

IMAGE_KNOBS = {
    "grey": Knob(
        "kernels.image.convert.api",
        "GREY_METAS",
        grid(BLOCK=(64, 128, 256, 512), num_warps=(2, 4, 8, 16)),
    ),
    "resize": Knob(
        "kernels.image.resize.api",
        "METAS",
        grid(
            BLOCK=(128, 256, 512),
            BY_WORDS=(1,),
            RAISED=(0, 2, 3),
            ROWS=(2, 4, 8),
            num_warps=(4, 8),
        ),
    ),
}


def image_cases() -> Iterator[Case]:
    yield Case(
        "grey",
        f"{PAGES} x 3 uint8",
        grey,
        convert_reference.grey,
        lambda: (_random(BATCH, HEIGHT, WIDTH, 3),),
        num_bytes=BATCH * HEIGHT * WIDTH * 4,
        units=BATCH,
        bar_us=GREY_BAR_US,
        peers={"kornia": _kornia_grey},
    )
    yield Case(
        "resize",
        f"{PAGES} x 3 uint8 -> {TARGET_HEIGHT} x {TARGET_WIDTH} float16",
        resize_normalise,
        _resize,
        lambda: (_random(BATCH, HEIGHT, WIDTH, 3), TARGET_HEIGHT, TARGET_WIDTH, MEAN, STD),
        num_bytes=BATCH * 3 * (HEIGHT * WIDTH + 2 * TARGET_HEIGHT * TARGET_WIDTH),
        units=BATCH,
        rtol=2**-10,
        atol=2**-10,
        bar_us=RESIZE_BAR_US,
        peers={"kornia": _kornia_resize},
    )


def _random(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, device="cuda")


def _planes(pages_bgr: torch.Tensor) -> torch.Tensor:
    """[batch, 3, height, width] float32, red first."""
    return pages_bgr.permute(0, 3, 1, 2).flip(1).float()


def _resize(
    pages_bgr: torch.Tensor,
    height: int,
    width: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> torch.Tensor:
    resized = F.interpolate(_planes(pages_bgr), (height, width), mode="bilinear")
    channels = [
        (plane / 255 - one) / other
        for plane, one, other in zip(resized.unbind(1), mean, std, strict=True)
    ]
    return torch.stack(channels, dim=1).half()


def _kornia_grey(pages_bgr: torch.Tensor) -> torch.Tensor:
    import kornia

    scaled = pages_bgr.permute(0, 3, 1, 2).float() / 255
    return (kornia.color.bgr_to_grayscale(scaled) * 255).to(torch.uint8)


def _kornia_resize(
    pages_bgr: torch.Tensor,
    height: int,
    width: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> torch.Tensor:
    import kornia

    scaled = _planes(pages_bgr) / 255
    resized = kornia.geometry.transform.resize(scaled, (height, width), "bilinear")
    return kornia.enhance.normalize(resized, torch.tensor(mean), torch.tensor(std)).half()
