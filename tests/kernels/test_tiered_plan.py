"""Every step of every sequence is taken once, in equal shares."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.checked_interpreter import assert_equals_reference
from kernels.kv_quantise.layout import slabs_of_block
from kernels.launch import cdiv
from kernels.tiered_plan import reference
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import FORMATS, Formats
from tests.kernels.launches import assert_bundled
from tests.kernels.slab_caches import bounds_of

PLACES = (reference.FIRST_TOKEN_SLAB, reference.FIRST_COLD, reference.FIRST_WARM)
TIERS = st.tuples(*(st.integers(0, 3) for _ in range(3)), st.integers(0, 200))


def bounds_from(tiers: list[tuple[int, int, int, int]]) -> torch.Tensor:
    """Blocks of sink, cold and warm tier, and tokens of the hot one."""
    rows = [
        [64 * sink, 64 * (sink + cold), 64 * (sink + cold + warm), 64 * (sink + cold + warm) + hot]
        for sink, cold, warm, hot in tiers
    ]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 4)


@settings(deadline=None, max_examples=30)
@given(st.lists(TIERS, min_size=1, max_size=5), st.integers(1, 20), st.sampled_from(FORMATS))
@example([(0, 0, 2, 1)], 3, FORMATS[0])
def test_each_step_is_taken_once_and_runs_are_equal(tiers, num_runs, formats) -> None:
    bounds = bounds_from(tiers)
    plan = reference.tiered_plan(bounds, num_runs, formats).tolist()
    costs = (2, sum(slabs_of_block(each) for each in formats), 4)
    taken = [[[], [], []] for _ in tiers]
    runs_of: list[list[int]] = [[] for _ in tiers]
    shares = [0] * num_runs
    for record in plan:
        row, run = record[reference.SEQUENCE], record[reference.RUN]
        if run == reference.NO_RUN:
            continue
        runs_of[row].append(run)
        for tier, place in enumerate(PLACES):
            steps = range(record[place], record[place + 1])
            taken[row][tier] += steps
            shares[run] += costs[tier] * len(steps)

    for row, (sink, cold, warm, hot) in enumerate(tiers):
        if formats.value_bits == 8:
            cold, warm = cold + warm, 0
        expected = [4 * sink + cdiv(hot, 16), cold, warm]
        assert [sorted(each) for each in taken[row]] == [list(range(each)) for each in expected]
        first, count = plan[num_runs + row][reference.FIRST_RUN :][:2]
        assert sorted(runs_of[row]) == [*range(first, first + count)]
    assert sorted(record[reference.TURN] for record in plan) == [*range(len(plan))]
    num_least = num_runs - num_runs // reference.SPARED
    most = cdiv(sum(shares) + len(tiers) * reference.CHANGE_COST, num_least)
    assert max(shares) <= most + max(costs) - 1


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("num_runs", [1, 7, 40])
def test_the_kernel_equals_its_reference(num_runs: int, formats: Formats) -> None:
    lengths = [1000, 0, 64, 65, 131, 0, 200, 3000]
    for bounds in (bounds_of(lengths), bounds_of(lengths * 9), bounds_of([0, 0])):
        assert_equals_reference(tiered_plan, reference.tiered_plan, bounds, num_runs, formats)


def test_no_run_goes_on_where_none_has_to() -> None:
    bounds = torch.tensor([[0, each, each, each] for each in (8192, 6400, 512)], dtype=torch.int32)
    plan = reference.tiered_plan(bounds, 40, FORMATS[0])
    assert plan[40:, reference.RUN].tolist() == [reference.NO_RUN] * 3
    assert 35 <= plan[40:, reference.NUM_RUNS].sum() <= 40


def test_places_are_left_to_what_begins_within_a_run() -> None:
    bounds = torch.tensor([[0, 8192, 8192, 8192]] * 27, dtype=torch.int32)
    plan = reference.tiered_plan(bounds, 132, FORMATS[0])
    num_runs = int((plan[:132, reference.RUN] >= 0).sum())
    assert num_runs == 116
    assert plan[132:, reference.RUN].max() >= 0


def test_equal_sequences_are_cut_alike() -> None:
    """Though a run of a part less would be enough."""
    bounds = torch.tensor([[0, 8192, 8192, 8192]] * 32, dtype=torch.int32)
    plan = reference.tiered_plan(bounds, 132, FORMATS[0])
    assert plan[132:, reference.NUM_RUNS].tolist() == [4] * 32
    assert plan[:, reference.RUN].tolist() == [*range(128), *[reference.NO_RUN] * 36]


def test_the_launch_of_a_served_model_has_its_variant() -> None:
    assert_bundled(lambda: tiered_plan(bounds_of([100]), 3, reference.SERVED_FORMATS))
