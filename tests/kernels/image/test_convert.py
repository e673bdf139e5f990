from contextlib import nullcontext

import cv2
import numpy as np
import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.image.convert import reference
from kernels.image.convert.api import grey, swap_channels, to_ycrcb
from tests.kernels.image.pages import SHAPES, noise
from tests.kernels.launches import assert_bundled


@pytest.fixture(scope="module")
def all_colours() -> torch.Tensor:
    """Every seventh of the 2^24: one page that has all pairs of levels in each two channels."""
    values = np.arange(0, 1 << 24, 7, dtype=np.uint32)
    return torch.from_numpy(values.view(np.uint8).reshape(1, 1, -1, 4)[..., :3].copy())


def test_grey_is_opencvs(all_colours: torch.Tensor) -> None:
    expected = cv2.cvtColor(all_colours[0].numpy(), cv2.COLOR_BGR2GRAY)

    assert np.array_equal(grey(all_colours)[0].numpy(), expected)


def test_ycrcb_is_opencvs(all_colours: torch.Tensor) -> None:
    expected = cv2.cvtColor(all_colours[0].numpy(), cv2.COLOR_BGR2YCrCb)

    assert np.array_equal(to_ycrcb(all_colours)[0].numpy(), expected)


def test_swapped_is_opencvs() -> None:
    page = noise(1, 9, 5, 3)

    assert np.array_equal(
        swap_channels(page)[0].numpy(), cv2.cvtColor(page[0].numpy(), cv2.COLOR_BGR2RGB)
    )


@pytest.mark.parametrize("shape", [*SHAPES, (1, 100, 200), (0, 4, 4), (2, 0, 3)])
@pytest.mark.parametrize("name", ["grey", "swap_channels", "to_ycrcb"])
def test_the_kernel_equals_its_reference(name: str, shape: tuple[int, ...]) -> None:
    op = {"grey": grey, "swap_channels": swap_channels, "to_ycrcb": to_ycrcb}[name]

    assert_equals_reference(op, getattr(reference, name), noise(*shape, 3))


@pytest.mark.parametrize("op", [grey, swap_channels, to_ycrcb])
def test_extreme_levels(op) -> None:
    corners = torch.cartesian_prod(*[torch.tensor([0, 255], dtype=torch.uint8)] * 3)

    assert_equals_reference(op, getattr(reference, op.__name__), corners.repeat(5, 1)[None, None])


def test_a_page_cut_out_of_a_batch() -> None:
    pages = noise(3, 5, 7, 3)

    with checked():
        assert torch.equal(grey(pages[1:]), reference.grey(pages)[1:])


@pytest.mark.parametrize("op", [grey, swap_channels, to_ycrcb])
@pytest.mark.parametrize("mode", [nullcontext, checked])
def test_pages_of_another_form_are_refused(op, mode) -> None:
    pages = torch.zeros(2, 4, 4, 3, dtype=torch.uint8)
    refused = [pages[0], pages.float(), pages[:, :, ::2], pages[..., :2], pages.permute(0, 3, 1, 2)]
    for each in refused:
        with mode(), pytest.raises(ContractError, match=f"{op.__name__}: pages must be contiguous"):
            op(each)


@pytest.mark.parametrize("shape", [(1, 1, 1), (64, 2, 8), (3, 31, 47)])
@pytest.mark.parametrize("op", [grey, swap_channels, to_ycrcb])
def test_every_launch_has_its_variant(op, shape: tuple[int, ...]) -> None:
    assert_bundled(lambda: op(noise(*shape, 3)))
