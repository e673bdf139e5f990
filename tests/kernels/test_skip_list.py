import math

import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference
from kernels.skip_list import reference
from kernels.skip_list.api import skip_list
from kernels.tiered_plan.reference import FORMATS, SERVED_FORMATS
from kernels.tiered_skip.reference import num_cold_of
from tests.kernels.launches import assert_bundled
from tests.kernels.mutants.skip_list import weighed

BOUNDS = torch.tensor([[64, 64 * 300, 64 * 303, 64 * 305], [0, 0, 0, 7], [0, 64, 192, 200]]).int()
LONG = torch.tensor([[0, 64 * 640, 64 * 641, 64 * 642], [64, 64 * 530, 64 * 531, 64 * 540]]).int()


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("group", [1, 3, 8, 9])
def test_equals_its_reference(group: int, formats: object) -> None:
    masses, lse = weighed(2 * len(BOUNDS), 2, 305, group)
    assert_equals_reference(skip_list, reference.skip_list, masses, lse, BOUNDS, formats, 0.02)


@pytest.mark.parametrize("group", [1, 2, 16])
def test_more_blocks_than_stay_in_registers(group: int) -> None:
    masses, lse = weighed(len(LONG), 1, 700, group)
    arguments = masses, lse + 2, LONG, SERVED_FORMATS, 0.02
    assert_equals_reference(skip_list, reference.skip_list, *arguments)


@pytest.mark.parametrize("budget", [0.0, 1e-3, 0.03, 0.5])
def test_the_lightest_blocks_within_the_budget(budget: float) -> None:
    masses, lse = weighed(len(BOUNDS), 2, 305, 3)
    skips = reference.skip_list(masses, lse, BOUNDS, SERVED_FORMATS, budget)
    shares = (masses.double() * math.log(2) - lse.double().view(3, 2, 1, 3)).exp()
    for row, bounds in enumerate(BOUNDS.tolist()):
        num_cold = num_cold_of(bounds, SERVED_FORMATS)
        assert not skips[row, :, num_cold:].any()
        for head in range(2):
            chosen = skips[row, head, :num_cold].bool()
            own = shares[row, head, :num_cold]
            assert (own[chosen].sum(0) <= budget).all()
            if chosen.all():
                continue
            greatest = own.amax(1)
            lightest = greatest[~chosen].min()
            assert (greatest[chosen] <= lightest).all()
            more = greatest <= lightest * num_cold ** (2**-reference.NUM_HALVINGS)
            assert (own[more].sum(0) > budget).any()


def test_every_launch_of_a_served_model_has_its_variant() -> None:
    masses, lse = weighed(len(BOUNDS), 2, 305, 4)
    assert_bundled(lambda: skip_list(masses, lse, BOUNDS, SERVED_FORMATS, 0.01))
