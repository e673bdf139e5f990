from contextlib import nullcontext

import cv2
import numpy as np
import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.image.binarize.api import sauvola
from kernels.image.lines import reference
from kernels.image.lines.api import line_runs, projections
from tests.kernels.image.pages import noise, report
from tests.kernels.launches import assert_bundled


def mostly_ink(*shape: int, seed: int = 0) -> torch.Tensor:
    """Runs of all lengths up to dozens."""
    return noise(*shape, seed=seed) // 240 * 255


def opened(page: torch.Tensor, min_length: int, axis: int) -> np.ndarray:
    ink = np.where(page.numpy() < 128, 255, 0).astype(np.uint8)
    line = np.ones((min_length, 1) if axis == 1 else (1, min_length), np.uint8)
    border = {"borderType": cv2.BORDER_CONSTANT, "borderValue": 0}
    return cv2.dilate(cv2.erode(ink, line, **border), line[::-1, ::-1], **border, **centre(line))


def centre(line: np.ndarray) -> dict:
    """Of an even line OpenCV's two halves would lie one pixel apart."""
    height, width = line.shape
    return {"anchor": (width - 1 - width // 2, height - 1 - height // 2)}


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("min_length", [1, 2, 3, 8, 25, 40, 60])
def test_the_reference_is_opencvs_opening(min_length: int, axis: int) -> None:
    for page in (mostly_ink(37, 53), sauvola(report(120, 90)[None])[0], noise(20, 31)):
        found = line_runs(page[None], min_length, axis)[0].numpy()

        assert np.array_equal(found, opened(page, min_length, axis))


def test_the_rules_of_a_table_are_found() -> None:
    page = torch.full((1, 60, 80), 255, dtype=torch.uint8)
    page[0, [10, 30, 50], 5:75] = 0
    page[0, 10:51, [5, 40, 74]] = 0
    page[0, 15:25:2, 10:30] = 0  # text: strokes of 20

    horizontal, vertical = line_runs(page, 30, 2), line_runs(page, 30, 1)

    assert sorted(set(horizontal[0].nonzero()[:, 0].tolist())) == [10, 30, 50]
    assert horizontal.count_nonzero() == 3 * 70
    assert sorted(set(vertical[0].nonzero()[:, 1].tolist())) == [5, 40, 74]
    assert vertical.count_nonzero() == 3 * 41


SHAPES = [(1, 1, 1), (3, 1, 40), (1, 40, 1), (3, 13, 29), (1, 70, 90)]


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("min_length", [1, 2, 7, 30, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_equals_its_reference(
    shape: tuple[int, int, int], min_length: int, axis: int
) -> None:
    assert_equals_reference(line_runs, reference.line_runs, mostly_ink(*shape), min_length, axis)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("min_length", [5, 260])
def test_runs_over_several_blocks(min_length: int, axis: int) -> None:
    page = torch.zeros(1, 3, 300, dtype=torch.uint8)
    page[0, 0, 150], page[0, 1, [20, 290]], page[0, 2, ::6] = 255, 200, 128

    pages = page if axis == 2 else page.transpose(1, 2).contiguous()
    assert_equals_reference(line_runs, reference.line_runs, pages, min_length, axis)


@pytest.mark.parametrize("level", [0, 127, 128, 255])
def test_ink_is_below_128(level: int) -> None:
    page = torch.full((1, 3, 3), level, dtype=torch.uint8)
    expected = torch.full_like(page, 255 if level < 128 else 0)

    assert torch.equal(line_runs(page, 3, 1), expected)
    with checked():
        assert torch.equal(line_runs(page, 3, 1), expected)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 65, 129), (0, 3, 3)])
def test_the_projections_equal_their_reference(shape: tuple[int, int, int]) -> None:
    assert_equals_reference(projections, reference.projections, noise(*shape))


def test_projections_count_ink() -> None:
    rows, columns = projections(torch.tensor([[[0, 255, 7], [255, 255, 127]]], dtype=torch.uint8))

    assert (rows.tolist(), columns.tolist()) == ([[2, 1]], [[1, 0, 2]])


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_no_pixels(shape: tuple[int, int, int], axis: int) -> None:
    assert_equals_reference(line_runs, reference.line_runs, noise(*shape), 2, axis)


@pytest.mark.parametrize("mode", [nullcontext, checked])
def test_what_is_refused(mode) -> None:
    page = noise(1, 4, 4)
    with mode(), pytest.raises(ContractError, match="axis must be 1 or 2, came 0"):
        line_runs(page, 3, 0)
    with mode(), pytest.raises(ContractError, match="min_length must be at least 1, came 0"):
        line_runs(page, 0, 1)
    with mode(), pytest.raises(ContractError, match="pages must be contiguous"):
        line_runs(page.transpose(1, 2), 3, 1)
    with mode(), pytest.raises(ContractError, match="pages must be contiguous"):
        projections(page[0])


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 16, 32), (2, 31, 517)])
def test_every_launch_has_its_variant(shape: tuple[int, int, int]) -> None:
    for axis in (1, 2):
        assert_bundled(lambda axis=axis: line_runs(noise(*shape), 9, axis))
    assert_bundled(lambda: projections(noise(*shape)))
