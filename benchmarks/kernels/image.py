"""The image kernels on 64 A4 pages at 200 dpi, random pixels."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Case
from benchmarks.kernels.tune import Knob, grid
from kernels.image.binarize import reference as binarize_reference
from kernels.image.binarize.api import sauvola
from kernels.image.convert import reference as convert_reference
from kernels.image.convert.api import grey
from kernels.image.resize.api import resize_normalise

BATCH, HEIGHT, WIDTH = 64, 2339, 1654
TARGET_HEIGHT, TARGET_WIDTH = 1280, 960
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
PAGES = f"{BATCH} x {HEIGHT} x {WIDTH}"
WINDOW, K = 25, 0.2
GREY_BAR_US, RESIZE_BAR_US, SAUVOLA_BAR_US = 4.6, 6.0, 10.0

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
    "sauvola": Knob(
        "kernels.image.binarize.api",
        "META",
        grid(BLOCK=(32,), QUADS=(6,), ROWS=(32, 64, 128), num_warps=(1, 2)),
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

    yield Case(
        "sauvola",
        f"{PAGES} uint8, window {WINDOW}",
        sauvola,
        _sauvola,
        lambda: (_scan(BATCH, HEIGHT, WIDTH), WINDOW, K),
        num_bytes=BATCH * HEIGHT * WIDTH * 2,
        units=BATCH,
        bar_us=SAUVOLA_BAR_US,
        reference=binarize_reference.sauvola,
    )


def _scan(*shape: int) -> torch.Tensor:
    """Grey noise on paper that darkens to the right, and a fifth of the pixels ink."""
    light = torch.linspace(240, 120, shape[-1], device="cuda")
    ink = torch.rand(shape, device="cuda", dtype=torch.float16) < 0.2
    noise = 4 * torch.randn(shape, device="cuda", dtype=torch.float16)
    return torch.where(ink, 0.3 * light, light).add_(noise).clamp_(0, 255).to(torch.uint8)


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
    channels = [(resized[:, index] / 255 - mean[index]) / std[index] for index in range(3)]
    return torch.stack(channels, dim=1).half()


def _sauvola(pages: torch.Tensor, window: int, k: float) -> torch.Tensor:
    """In float32, whose sums are not exact: a few pixels come out otherwise."""
    half = window // 2
    padded = F.pad(pages[:, None].float(), (half, half, half, half), mode="reflect")
    mean = _averages(padded, window)
    squares = _averages(padded * padded, window)
    deviation = (squares - mean * mean).clamp_(min=0).sqrt_()
    threshold = mean * (1 + k * (deviation / binarize_reference.RANGE - 1))
    return torch.where(pages[:, None] > threshold, 255, 0).to(torch.uint8)[:, 0]


def _averages(padded: torch.Tensor, window: int) -> torch.Tensor:
    return F.avg_pool2d(F.avg_pool2d(padded, (window, 1), 1), (1, window), 1)


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
