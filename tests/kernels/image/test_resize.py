from contextlib import nullcontext
from functools import partial

import cv2
import numpy as np
import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.image.resize import reference
from kernels.image.resize.api import resize_normalise
from tests.kernels.image.pages import noise, report
from tests.kernels.launches import assert_bundled

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PLAIN = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
# Source and target [height, width]: unequal ratios, up, down, one pixel, whole words and not.
SIZES = [
    ((64, 80), (48, 61)),
    ((80, 64), (31, 48)),
    ((1, 1), (1, 1)),
    ((1, 1), (5, 7)),
    ((5, 7), (1, 1)),
    ((1, 9), (4, 3)),
    ((9, 1), (3, 4)),
    ((2, 2), (7, 5)),
    ((11, 7), (30, 15)),
    ((20, 60), (10, 30)),
    ((13, 12), (13, 12)),
    ((90, 7), (3, 300)),
]


def opencv(page: torch.Tensor, height: int, width: int) -> np.ndarray:
    rgb = cv2.cvtColor(page.numpy(), cv2.COLOR_BGR2RGB).astype(np.float32) / np.float32(255)
    resized = cv2.resize(rgb, (width, height), interpolation=cv2.INTER_LINEAR)
    return resized.reshape(height, width, 3).transpose(2, 0, 1)


@pytest.mark.parametrize(("source", "target"), [*SIZES, ((1169, 827), (640, 480))])
def test_the_reference_is_opencvs(source: tuple[int, int], target: tuple[int, int]) -> None:
    page = noise(*source, 3)

    resized = resize_normalise(page[None], *target, *PLAIN, dtype=torch.float32)

    assert np.abs(resized[0].numpy() - opencv(page, *target)).max() <= 1e-6


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_the_reference_is_torchs(source: tuple[int, int], target: tuple[int, int]) -> None:
    page = noise(1, *source, 3)

    resized = resize_normalise(page, *target, *PLAIN, dtype=torch.float32)

    planes = page.permute(0, 3, 1, 2).flip(1).double() / 255
    theirs = torch.nn.functional.interpolate(planes, target, mode="bilinear", align_corners=False)
    torch.testing.assert_close(resized.double(), theirs, rtol=0, atol=1e-6)


def test_a_shrink_by_two_is_the_mean() -> None:
    page = noise(1, 6, 4, 3)

    resized = resize_normalise(page, 3, 2, *PLAIN, dtype=torch.float32)

    means = page.double().view(3, 2, 2, 2, 3).mean((1, 3)).permute(2, 0, 1).flip(0) / 255
    torch.testing.assert_close(resized[0].double(), means, rtol=0, atol=1e-6)


def test_mean_and_std_are_those_of_red_green_blue() -> None:
    page = torch.tensor([10, 20, 30], dtype=torch.uint8).expand(1, 3, 4, 3).contiguous()

    resized = resize_normalise(page, 5, 2, MEAN, STD, dtype=torch.float32)

    expected = [(v / 255 - m) / s for v, m, s in zip((30, 20, 10), MEAN, STD, strict=True)]
    torch.testing.assert_close(resized[0, :, 3, 1], torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_source", "num_target"), [(1654, 960), (7, 7), (3, 10**5), (9, 2)])
def test_taps_are_exact(num_source: int, num_target: int) -> None:
    index, weight = reference.taps(num_source, num_target)

    centres = (np.arange(num_target) + 0.5) * (num_source / num_target) - 0.5
    assert 0 <= index.min() <= index.max() <= num_source - 2
    assert 0 <= weight.min() <= weight.max() <= 1
    np.testing.assert_allclose(
        index.double() + weight, centres.clip(0, num_source - 1), rtol=0, atol=1e-7
    )


def assert_resized(
    pages: torch.Tensor, target: tuple[int, int], dtype: torch.dtype, rtol: float = 0.0
) -> None:
    mean, std = (MEAN, STD) if dtype is torch.float16 else PLAIN
    ops = [partial(op, dtype=dtype) for op in (resize_normalise, reference.resize_normalise)]
    assert_equals_reference(*ops, pages, *target, mean, std, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize(("source", "target"), SIZES)
def test_the_kernel_equals_its_reference(source: tuple[int, int], target: tuple[int, int]) -> None:
    assert_resized(noise(1, *source, 3), target, torch.float32)


@pytest.mark.parametrize("batch", [3, 4])
@pytest.mark.parametrize(("source", "target"), [SIZES[2], *SIZES[5:9]])
def test_batches_of_whole_words_and_others(
    source: tuple[int, int], target: tuple[int, int], batch: int
) -> None:
    assert_resized(noise(batch, *source, 3), target, torch.float32)


@pytest.mark.parametrize("batch", [1, 4])
def test_float16_of_a_normalised_report(batch: int) -> None:
    page = report(75, 61)
    pages = torch.stack([page, page.flip(0), 255 - page], -1).expand(batch, -1, -1, -1).contiguous()

    assert_resized(pages, (13, 48), torch.float16, rtol=2**-10)


def test_targets_of_several_blocks_and_no_multiple_of_any() -> None:
    assert_resized(noise(2, 10, 90, 3), (5, 513), torch.float32)


def test_no_pages() -> None:
    assert_resized(noise(0, 4, 4, 3), (2, 3), torch.float16)


def test_words_and_bytes_agree_to_the_bit() -> None:
    page = noise(1, 9, 7, 3)  # 189 bytes; four pages are whole words

    with checked():
        by_bytes = resize_normalise(page, 6, 11, MEAN, STD)
        by_words = resize_normalise(page.expand(4, -1, -1, -1).contiguous(), 6, 11, MEAN, STD)

    assert by_words.eq(by_bytes).all()


@pytest.mark.parametrize("mode", [nullcontext, checked])
@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"pages_bgr": torch.zeros(1, 4, 4, dtype=torch.uint8)}, "pages must be contiguous"),
        ({"pages_bgr": torch.zeros(1, 0, 4, 3, dtype=torch.uint8)}, "at least one pixel"),
        ({"height": 0}, "height must be at least 1, came 0"),
        ({"width": -3}, "width must be at least 1, came -3"),
        ({"std": (1.0, 0.0, 1.0)}, "std must be above 0"),
        ({"mean": (0.5,)}, "mean must be of red, green, blue, came 1 numbers"),
        ({"dtype": torch.float64}, "dtype must be one of"),
    ],
)
def test_what_is_refused(mode, named: dict, message: str) -> None:
    usual = {"pages_bgr": noise(1, 4, 4, 3), "height": 2, "width": 2, "mean": MEAN, "std": STD}
    with mode(), pytest.raises(ContractError, match=message):
        resize_normalise(**usual | named)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("target", [(1, 1), (48, 61), (32, 960)])
def test_every_launch_has_its_variant(
    target: tuple[int, int], batch: int, dtype: torch.dtype
) -> None:
    pages = noise(batch, 9, 7, 3)

    assert_bundled(lambda: resize_normalise(pages, *target, MEAN, STD, dtype))
