from contextlib import nullcontext

import cv2
import numpy as np
import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.image.deskew import reference
from kernels.image.deskew.api import deskew, estimate_skew, profiles_of, strips_of
from tests.kernels.image.pages import noise, report
from tests.kernels.launches import assert_bundled


def turned(page: torch.Tensor, degrees: float) -> torch.Tensor:
    height, width = page.shape
    matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), degrees, 1.0)
    return torch.from_numpy(
        cv2.warpAffine(page.numpy(), matrix, (width, height), borderValue=255, flags=cv2.INTER_AREA)
    )


@pytest.mark.parametrize("size", [(1169, 827), (700, 990)])
def test_the_skew_of_a_turned_report_is_found(size: tuple[int, int]) -> None:
    truth = torch.tensor([-5.0, -3.33, -1.07, -0.2, 0.0, 0.14, 0.9, 2.62, 4.81])
    page = report(*size)
    pages = torch.stack([turned(page, float(each)) for each in truth])

    found = estimate_skew(pages)

    assert (found - truth).abs().max() <= 0.1


def test_a_page_without_ink_was_not_turned() -> None:
    assert estimate_skew(torch.full((2, 60, 50), 255, dtype=torch.uint8)).eq(0).all()


def test_an_angle_beyond_the_greatest_is_found_with_more_degrees() -> None:
    page = turned(report(600, 500), 8.4)[None]

    assert (estimate_skew(page, max_degrees=10) - 8.4).abs() <= 0.1


@pytest.mark.parametrize("degrees", [-4.0, 0.0, 0.7, 5.0])
def test_turning_is_opencvs(degrees: float) -> None:
    page = cv2.GaussianBlur(report(150, 211).numpy(), (5, 5), 1.0)
    height, width = page.shape
    matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), -degrees, 1.0)

    expected = cv2.warpAffine(
        page.astype(np.float32), matrix, (width, height), flags=cv2.INTER_LINEAR, borderValue=255
    )
    found = deskew(torch.from_numpy(page)[None], torch.tensor([degrees]))[0].numpy()

    # OpenCV may round the place of a pixel to 1/32.
    assert np.abs(found - expected).max() <= 0.5 + 255 / 32
    assert np.abs(found - expected).mean() <= 0.5


def test_a_page_turned_there_and_back() -> None:
    page = torch.from_numpy(cv2.GaussianBlur(report(300, 220).numpy(), (7, 7), 2.0))

    back = deskew(turned(page, 3.0)[None], torch.tensor([3.0]))[0]

    inside = (slice(40, -40), slice(40, -40))
    assert (back[inside].float() - page[inside].float()).abs().mean() <= 2.0


def test_no_degrees_change_nothing() -> None:
    pages = noise(2, 13, 29)

    assert torch.equal(deskew(pages, torch.zeros(2)), pages)


SHAPES = [(1, 1, 1), (3, 1, 40), (1, 40, 1), (3, 13, 29), (1, 70, 90)]


@pytest.mark.parametrize("shape", [*SHAPES, (1, 5, 300)])
def test_the_strips_equal_their_reference(shape: tuple[int, int, int]) -> None:
    assert_equals_reference(strips_of, reference.strips, noise(*shape))


@pytest.mark.parametrize("shape", [*SHAPES, (1, 600, 17)])
def test_the_profiles_equal_their_reference(shape: tuple[int, int, int]) -> None:
    strips = reference.strips(noise(*shape))
    degrees = torch.tensor([[-45.0, -2.3, 0.0, 5.0]]).expand(shape[0], -1) * 0.9
    slopes = reference.slopes_of(degrees)

    assert_equals_reference(profiles_of, reference.profiles, strips, slopes, shape[2])


def test_the_profile_at_no_angle_is_the_ink_of_the_rows() -> None:
    pages = noise(2, 19, 37)

    profile = profiles_of(strips_of(pages), torch.zeros(2, 1), 37)

    assert torch.equal(profile[:, 0].long(), (pages < 128).sum(2))


@pytest.mark.parametrize("degrees", [-33.0, -5.0, 0.0, 1.3, 90.0])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 9, 140)])
def test_turning_equals_its_reference(shape: tuple[int, int, int], degrees: float) -> None:
    turns = torch.linspace(degrees, degrees / 2, shape[0])
    pages = noise(*shape)

    with checked():
        found = deskew(pages, turns)

    assert torch.equal(found, reference.turn(pages, reference.rotation_of(turns)))


def test_the_kernels_find_what_the_reference_finds() -> None:
    page = turned(report(80, 120), 2.0)[None]

    with checked():
        found = estimate_skew(page, max_degrees=0.5, step=0.125)

    assert torch.equal(found, estimate_skew(page, max_degrees=0.5, step=0.125))


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
@pytest.mark.parametrize("mode", [nullcontext, checked])
def test_no_pixels(mode, shape: tuple[int, int, int]) -> None:
    with mode():
        assert estimate_skew(noise(*shape)).tolist() == [0.0] * shape[0]
        assert deskew(noise(*shape), torch.ones(shape[0])).shape == shape


@pytest.mark.parametrize("mode", [nullcontext, checked])
def test_what_is_refused(mode) -> None:
    page = noise(1, 4, 4)
    with mode(), pytest.raises(ContractError, match="max_degrees must be above 0, at most 45"):
        estimate_skew(page, max_degrees=50)
    with mode(), pytest.raises(ContractError, match="step must be from 0"):
        estimate_skew(page, step=0)
    with mode(), pytest.raises(ContractError, match="pages must be contiguous"):
        estimate_skew(page[0])
    with mode(), pytest.raises(ContractError, match=r"degrees must be floats \[1\]"):
        deskew(page, torch.zeros(2))
    with mode(), pytest.raises(ContractError, match=r"degrees must be floats \[1\]"):
        deskew(page, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 16, 32), (2, 31, 517)])
def test_every_launch_has_its_variant(shape: tuple[int, int, int]) -> None:
    assert_bundled(lambda: estimate_skew(noise(*shape)))
    assert_bundled(lambda: deskew(noise(*shape), torch.zeros(shape[0])))
