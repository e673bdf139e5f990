from contextlib import nullcontext

import numpy as np
import pytest
import torch
from skimage.filters import threshold_sauvola

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.image.binarize import reference
from kernels.image.binarize.api import sauvola
from tests.kernels.image.pages import noise, report
from tests.kernels.launches import assert_bundled


def steps(height: int, width: int) -> torch.Tensor:
    """Flat fields whose edges and corners a window meets in every way; one is black."""
    page = torch.full((height, width), 200, dtype=torch.uint8)
    page[: height // 3] = 0
    page[:, : width // 4] = 255
    page[height // 2 :, width // 2 :] = 1
    return page


def dark_bordered(height: int, width: int) -> torch.Tensor:
    page = report(height, width)
    page[:5] = 3
    page[-4:] = 0
    page[:, :6] = 10
    page[:, -3:] = 1
    return page


PAGES = {
    "noise": noise(40, 57),
    "faint": 200 + noise(33, 70) // 128,
    "report": report(69, 90),
    "dark borders": dark_bordered(50, 64),
    "steps": steps(45, 60),
    "white": torch.full((30, 31), 255, dtype=torch.uint8),
    "black": torch.zeros(9, 40, dtype=torch.uint8),
    "grey": torch.full((12, 9), 113, dtype=torch.uint8),
    "one pixel": noise(1, 1),
    "one row": noise(1, 37),
    "one column": noise(37, 1),
    "smaller than the window": noise(5, 7),
    "two by two": noise(2, 2),
}


def scikit_image(page: torch.Tensor, window: int, k: float) -> np.ndarray:
    levels = page.numpy()
    above = levels > threshold_sauvola(levels, window_size=window, k=k, r=128)
    return np.where(above, 255, 0).astype(np.uint8)


@pytest.mark.parametrize(("window", "k"), [(25, 0.2), (3, 0.5), (15, 0.0), (61, 0.2), (7, 1.0)])
@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_scikit_images(name: str, window: int, k: float) -> None:
    page = PAGES[name]

    expected = scikit_image(page, window, k)

    assert np.array_equal(sauvola(page[None], window, k)[0].numpy(), expected)


def test_a_page_of_200_dpi_is_scikit_images() -> None:
    page = dark_bordered(1169, 827)

    assert np.array_equal(sauvola(page[None])[0].numpy(), scikit_image(page, 25, 0.2))


def test_sums_of_the_widest_window_fit() -> None:
    page = torch.full((1, 200, 190), 255, dtype=torch.uint8)
    page[0, 100, 95] = 0

    expected = scikit_image(page[0], 181, 0.2)
    assert np.array_equal(sauvola(page, 181)[0].numpy(), expected)


@pytest.mark.parametrize("name", PAGES)
def test_the_kernel_equals_its_reference(name: str) -> None:
    assert_equals_reference(sauvola, reference.sauvola, PAGES[name][None].contiguous(), 25, 0.2)


@pytest.mark.parametrize(("window", "k"), [(1, 0.2), (3, 0.5), (15, 0.0), (61, 0.125), (7, 1.0)])
@pytest.mark.parametrize("name", ["noise", "steps", "smaller than the window"])
def test_other_windows(name: str, window: int, k: float) -> None:
    assert_equals_reference(sauvola, reference.sauvola, PAGES[name][None].contiguous(), window, k)


@pytest.mark.parametrize("window", [9, 25])
def test_several_blocks_of_rows_and_columns(window: int) -> None:
    assert_equals_reference(sauvola, reference.sauvola, report(131, 117)[None], window, 0.2)


def test_a_batch() -> None:
    pages = torch.stack([report(13, 240, seed) for seed in range(3)])

    assert_equals_reference(sauvola, reference.sauvola, pages, 25, 0.2)


@pytest.mark.parametrize(("window", "width"), [(25, 440), (181, 700)])
def test_inner_blocks(window: int, width: int) -> None:
    assert_equals_reference(sauvola, reference.sauvola, noise(1, 3, width), window, 0.2)


def test_pixels_that_float32_cannot_decide() -> None:
    """At k = 0 the threshold is the mean: on flat fields each pixel lies right at it."""
    for level in (1, 113, 255):
        page = torch.full((1, 7, 300), level, dtype=torch.uint8)
        page[0, 3, 30] -= 1
        assert_equals_reference(sauvola, reference.sauvola, page, 25, 0.0)


def test_a_page_does_not_depend_on_its_batch() -> None:
    pages = torch.stack([report(15, 40, seed) for seed in range(3)])

    with checked():
        assert torch.equal(sauvola(pages)[1:2], sauvola(pages[1:2]))


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 5), (2, 5, 0)])
def test_no_pixels(shape: tuple[int, int, int]) -> None:
    assert sauvola(noise(*shape)).shape == shape
    with checked():
        assert sauvola(noise(*shape)).shape == shape


@pytest.mark.parametrize("mode", [nullcontext, checked])
@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"pages": torch.zeros(4, 4, dtype=torch.uint8)}, "pages must be contiguous"),
        ({"pages": torch.zeros(1, 4, 4)}, "pages must be contiguous"),
        ({"window": 24}, "window must be odd, from 1 to 181, came 24"),
        ({"window": 183}, "window must be odd, from 1 to 181, came 183"),
        ({"window": -1}, "window must be odd, from 1 to 181, came -1"),
        ({"k": 0.2001}, "k must be from 0 to 1, of at most three decimals, came 0.2001"),
        ({"k": 1.5}, "k must be from 0 to 1"),
        ({"k": float("nan")}, "k must be from 0 to 1"),
    ],
)
def test_what_is_refused(mode, named: dict, message: str) -> None:
    with mode(), pytest.raises(ContractError, match=message):
        sauvola(**{"pages": noise(1, 4, 4)} | named)


@pytest.mark.parametrize("window", [1, 25, 181])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 16, 32), (2, 31, 517)])
def test_every_launch_has_its_variant(shape: tuple[int, int, int], window: int) -> None:
    assert_bundled(lambda: sauvola(noise(*shape), window))


@pytest.mark.parametrize("window", [3, 25, 181])
@pytest.mark.parametrize("k", [0.0, 0.2, 1.0])
def test_the_guess_errs_less_than_the_kernel_allows(window: int, k: float) -> None:
    """Windows of two levels have every mean with every deviation, the least and the greatest."""
    generator = np.random.default_rng(window)
    n = window * window
    low, high = generator.integers(0, 256, (2, 300_000))
    high = np.where(generator.random(high.size) < 0.5, np.minimum(low + 1, 255), high)
    share = generator.integers(0, n + 1, low.size)
    levels, squares = share * low + (n - share) * high, share * low**2 + (n - share) * high**2

    mean = levels / n
    deviation = np.sqrt(np.maximum(squares / n - mean * mean, 0))
    threshold = mean * (1 + k * (deviation / 128 - 1))
    wide = levels.astype(np.float32)  # each step as in the kernel; float64 stands for a fused one
    spread = np.abs((squares.astype(np.float32) * np.float64(-n) + wide * wide).astype(np.float32))
    flat, steep = np.float32((k - 1) / n), np.float32(-k / (np.float64(n) * n * 128))
    rate = (np.sqrt(spread) * np.float64(steep) + flat).astype(np.float32)
    error = np.abs(wide * np.float64(rate) + threshold)

    allowed = levels * np.float32((k * 2**-10 + 2**-20) / n)
    assert (error <= 0.95 * allowed).all()
