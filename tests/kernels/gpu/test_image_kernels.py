"""The image kernels: equal to their references in every pixel, and to OpenCV and scikit-image where
the host has them."""

from itertools import product

import numpy as np
import pytest
import torch

from kernels.image.binarize import reference as binarize_reference
from kernels.image.binarize.api import sauvola
from kernels.image.convert import reference as convert_reference
from kernels.image.convert.api import grey, swap_channels, to_ycrcb
from kernels.image.deskew import reference as deskew_reference
from kernels.image.deskew.api import deskew, estimate_skew, profiles_of, strips_of
from kernels.image.lines import reference as lines_reference
from kernels.image.lines.api import line_runs, projections
from kernels.image.resize import reference as resize_reference
from kernels.image.resize.api import resize_normalise
from tests.kernels.gpu.compare import assert_gpu_equals_reference

pytestmark = pytest.mark.gpu
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
PAGE = (2339, 1654)
# Batch, height, width.
SMALL = [(1, 1, 1), (1, 1, 17), (3, 5, 7), (2, 61, 48), (3, 233, 165)]
SHAPES = [*SMALL, (2, *PAGE)]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def scan(height: int, width: int) -> torch.Tensor:
    """A grey page [height, width]: dark strokes on unevenly lit paper, some noise, a black edge."""
    generator = np.random.default_rng(0)
    light = np.linspace(240, 120, width)[None, :] * np.linspace(1, 0.8, height)[:, None]
    strokes = (np.arange(height)[:, None] // 7 % 5 == 0) & (generator.random((height, width)) < 0.4)
    page = np.where(strokes, light * 0.3, light) + generator.normal(0, 4, (height, width))
    page[:, : max(1, width // 40)] = 0
    return torch.from_numpy(page.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", ["grey", "swap_channels", "to_ycrcb"])
def test_colours(op: str, shape: tuple[int, int, int]) -> None:
    ours = {"grey": grey, "swap_channels": swap_channels, "to_ycrcb": to_ycrcb}[op]

    assert_gpu_equals_reference(ours, getattr(convert_reference, op), noise(*shape, 3))


def test_grey_is_opencvs() -> None:
    cv2 = pytest.importorskip("cv2")
    page = noise(*PAGE, 3)

    ours = grey(page[None].cuda())[0].cpu().numpy()

    assert np.array_equal(ours, cv2.cvtColor(page.numpy(), cv2.COLOR_BGR2GRAY))


def test_grey_of_more_than_2_31_bytes() -> None:
    pages = torch.randint(256, (190, *PAGE, 3), dtype=torch.uint8, device="cuda")
    assert pages.numel() > 2**31

    greys = grey(pages)

    for index in (0, 95, 189):
        expected = convert_reference.grey(pages[index : index + 1].cpu())
        assert torch.equal(greys[index : index + 1].cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((64, 80), (48, 61)),
        ((80, 64), (31, 48)),
        ((1, 1), (1, 1)),
        ((1, 1), (5, 7)),
        ((5, 7), (1, 1)),
        ((1, 9), (4, 3)),
        ((11, 7), (30, 15)),
        ((90, 7), (3, 300)),
        (PAGE, (1280, 960)),
    ],
)
@pytest.mark.parametrize("batch", [1, 4])
def test_resize(
    batch: int, source: tuple[int, int], target: tuple[int, int], dtype: torch.dtype
) -> None:
    rtol = 2**-10 if dtype is torch.float16 else 0.0

    assert_gpu_equals_reference(
        resize_normalise,
        resize_reference.resize_normalise,
        noise(batch, *source, 3),
        *target,
        MEAN,
        STD,
        dtype,
        rtol=rtol,
        atol=5e-6,
    )


def test_resize_is_opencvs() -> None:
    cv2 = pytest.importorskip("cv2")
    page, (height, width) = noise(64, 80, 3), (48, 61)

    ours = resize_normalise(page[None].cuda(), height, width, *PLAIN, torch.float32)

    rgb = cv2.cvtColor(page.numpy(), cv2.COLOR_BGR2RGB).astype(np.float32) / np.float32(255)
    theirs = cv2.resize(rgb, (width, height), interpolation=cv2.INTER_LINEAR).transpose(2, 0, 1)
    assert np.abs(ours[0].cpu().numpy() - theirs).max() <= 6e-6


@pytest.mark.parametrize("window", [1, 3, 25, 181])
@pytest.mark.parametrize("shape", SMALL)
def test_sauvola(shape: tuple[int, int, int], window: int) -> None:
    pages = noise(*shape)
    pages[-1, : shape[1] // 2] = 200  # flat: its deviation is zero

    assert_gpu_equals_reference(sauvola, binarize_reference.sauvola, pages, window, 0.2)


def test_sauvola_of_a_scan_is_scikit_images() -> None:
    filters = pytest.importorskip("skimage.filters")
    page = scan(1170, 827)

    ours = sauvola(page[None].cuda())[0].cpu().numpy()

    threshold = filters.threshold_sauvola(page.numpy(), window_size=25, k=0.2, r=128)
    assert np.array_equal(ours, np.where(page.numpy() > threshold, 255, 0))


@pytest.mark.parametrize(
    ("shape", "min_length"),
    [*product(SMALL, (1, 2, 25, 200, 5000)), ((2, *PAGE), 25)],
)
@pytest.mark.parametrize("axis", [1, 2])
def test_line_runs(shape: tuple[int, int, int], axis: int, min_length: int) -> None:
    pages = noise(*shape) // 250 * 255  # ink, with a speck of paper in 43
    pages[:, shape[1] // 2], pages[:, :, shape[2] // 3] = 0, 0

    assert_gpu_equals_reference(line_runs, lines_reference.line_runs, pages, min_length, axis)


@pytest.mark.parametrize("shape", SHAPES)
def test_projections(shape: tuple[int, int, int]) -> None:
    assert_gpu_equals_reference(projections, lines_reference.projections, noise(*shape))


@pytest.mark.parametrize("shape", SHAPES)
def test_strips_and_profiles(shape: tuple[int, int, int]) -> None:
    pages = noise(*shape)
    slopes = deskew_reference.slopes_of(torch.linspace(-5, 5, 5)).expand(len(pages), -1)
    strips = deskew_reference.strips(pages)

    assert_gpu_equals_reference(strips_of, deskew_reference.strips, pages)
    assert_gpu_equals_reference(
        profiles_of, deskew_reference.profiles, strips, slopes.contiguous(), shape[2]
    )


@pytest.mark.parametrize("shape", [*SMALL, (1, 700, 496)])
def test_deskew(shape: tuple[int, int, int]) -> None:
    """A level apart at most: the GPU's cosines, and so its places, may round otherwise."""
    pages, degrees = noise(*shape), torch.linspace(-5, 3.3, shape[0], dtype=torch.float64)

    assert_gpu_equals_reference(deskew, deskew, pages, degrees, atol=1)


def test_the_skew_of_lines_is_found() -> None:
    page = torch.full((1, 1200, 900), 255, dtype=torch.uint8)
    for row in range(150, 1050, 24):
        page[0, row : row + 7, 100:800] = 0
    degrees = torch.tensor([2.5, 0.0, -3.75], dtype=torch.float64)
    turned = deskew(page.expand(3, -1, -1).contiguous().cuda(), -degrees.cuda())

    found = estimate_skew(turned)

    torch.testing.assert_close(found.cpu(), degrees, atol=0.1, rtol=0)
