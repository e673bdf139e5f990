from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.scheduling.budget import AGING, TILE_TOKENS, Candidate, TimeBudget
from engine.scheduling.cost_model import CostModel
from engine.sequence import Sequence

BLOCK_SIZE = 64
COSTS = CostModel()


def candidate_of(num_wanted, start=0, arrival_s=0.0):
    num_tokens = start + num_wanted
    sequence = Sequence("s", [0] * num_tokens, num_tokens, SamplingParams(1), arrival_s=arrival_s)
    return Candidate(sequence, num_wanted)


def budget_of(seconds, num_tokens=2_048, now_s=0.0):
    return TimeBudget(num_tokens, seconds, COSTS, BLOCK_SIZE, now_s)


def test_a_chunk_is_as_long_as_its_time_and_of_whole_tiles():
    for start in (0, 32_000, 99_968):
        budget = budget_of(0.045)
        (num_tokens,) = budget.share([candidate_of(20_000, start)])
        assert num_tokens % TILE_TOKENS == 0
        assert COSTS.predict_chunk(num_tokens, start) <= 0.045
        assert COSTS.predict_chunk(num_tokens + TILE_TOKENS, start) > 0.045


def test_a_chunk_of_less_than_a_tile_ends_with_a_block():
    budget = budget_of(COSTS.predict_chunk(127, 99_968))
    assert budget.share([candidate_of(20_000, 99_968)]) == [BLOCK_SIZE]


@given(st.integers(0, 200_000), st.floats(0, 0.2), st.integers(1, 4_000))
def test_a_chunk_ends_with_a_block_or_the_prompt(start, seconds, num_wanted):
    (num_tokens,) = budget_of(seconds).share([candidate_of(num_wanted, start)])
    assert 0 < num_tokens <= num_wanted
    assert num_tokens == num_wanted or (start + num_tokens) % BLOCK_SIZE == 0


def test_a_start_within_a_block_is_made_up_for():
    assert budget_of(0.004).share([candidate_of(20_000, 10)]) == [128 - 10]


def test_without_a_bound_in_time_only_tokens_count():
    assert budget_of(inf, 2_000).share([candidate_of(20_000, 99_968)]) == [2_000 // 128 * 128]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-6])
def test_the_oldest_gets_a_block_even_without_time(seconds):
    candidates = [candidate_of(20_000, 99_968), candidate_of(200)]
    assert budget_of(seconds).share(candidates) == [BLOCK_SIZE, 0]
    assert budget_of(seconds).share([candidate_of(20_000, 99_978)]) == [64 - 10]
    assert budget_of(seconds).share([candidate_of(3)]) == [3]
    assert budget_of(seconds, num_tokens=2).share(candidates) == [2, 0]


def test_nobody_asks():
    assert budget_of(1.0).share([]) == []


def test_a_short_one_passes_and_the_oldest_keeps_half():
    granted = budget_of(0.040).share([candidate_of(100_000, 20_000), candidate_of(200)])
    assert granted[1] == 200
    assert COSTS.predict_chunk(granted[0] + TILE_TOKENS, 20_000) > 0.020


def test_a_crowd_leaves_the_oldest_its_half():
    crowd = [candidate_of(200) for _ in range(50)]
    budget = budget_of(0.040)
    granted = budget.share([candidate_of(100_000, 20_000), *crowd])
    assert COSTS.predict_chunk(granted[0] + TILE_TOKENS, 20_000) > 0.020
    assert granted[1:4] == [200] * 3
    assert granted[-1] == 0


def test_who_needs_less_time_goes_first_whatever_its_tokens():
    """1,000 tokens at the start of a prompt take less time than 400 at 100,000."""
    granted = budget_of(0.060).share(
        [candidate_of(100_000), candidate_of(400, 100_000), candidate_of(1_000)]
    )
    assert granted[2] == 1_000
    assert granted[1] < 400


def test_waiting_is_worth_work():
    """The bound: who needs R seconds is passed by none that came more than R / AGING after it."""
    needed_s = COSTS.predict_chunk(4_096, 0)
    for late_s, is_passed in ((0.9 * needed_s / AGING, True), (needed_s / AGING, False)):
        for waited_s in (0.0, 1.0, 1_000.0):
            candidates = [
                candidate_of(100_000, 20_000),
                candidate_of(4_096, arrival_s=5.0),
                candidate_of(200, arrival_s=5.0 + late_s),
            ]
            granted = budget_of(0.020, now_s=5.0 + late_s + waited_s).share(candidates)
            assert (granted[2] == 200) is is_passed
            assert (granted[1] >= BLOCK_SIZE) or is_passed


def test_the_oldest_does_not_hold_up_others_by_its_age():
    candidates = [candidate_of(2_000, 100_000), candidate_of(200, arrival_s=1_000.0)]
    granted = budget_of(0.045, now_s=1_000.0).share(candidates)
    assert granted[1] == 200


@given(
    num_tokens=st.integers(1, 4_096),
    seconds=st.floats(-0.01, 0.3) | st.just(inf),
    requests=st.lists(
        st.tuples(st.integers(1, 5_000), st.integers(0, 2_000), st.floats(0, 100)),
        min_size=1,
        max_size=6,
    ),
)
def test_share_keeps_both_limits_and_moves_the_oldest(num_tokens, seconds, requests):
    candidates = [candidate_of(*request) for request in requests]
    granted = budget_of(seconds, num_tokens, now_s=100.0).share(candidates)
    assert sum(granted) <= num_tokens
    oldest = candidates[0]
    num_least = min(oldest.num_wanted, BLOCK_SIZE - oldest.start % BLOCK_SIZE, num_tokens)
    assert granted[0] >= num_least
    cost = sum(
        COSTS.predict_chunk(num_granted, each.start)
        for each, num_granted in zip(candidates, granted, strict=True)
    )
    assert cost <= seconds + 1e-9 or granted == [num_least] + [0] * (len(granted) - 1)
    for index, (each, num_granted) in enumerate(zip(candidates, granted, strict=True)):
        assert 0 <= num_granted <= each.num_wanted
        is_whole = num_granted in (0, each.num_wanted)
        ends_block = (each.start + num_granted) % BLOCK_SIZE == 0
        assert is_whole or ends_block or (index == 0 and sum(granted) == num_tokens)
