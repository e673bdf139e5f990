import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.percentiles import percentile

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def test_between_two_samples_it_is_interpolated():
    assert percentile([40, 10, 20, 30], 50) == 25
    assert percentile([10, 20, 30, 40], 95) == pytest.approx(38.5)


@given(SAMPLES)
def test_its_ends_are_the_extremes_and_its_middle_the_median(samples: list[float]):
    assert percentile(samples, 0) == min(samples)
    assert percentile(samples, 100) == max(samples)
    assert percentile(samples, 50) == pytest.approx(statistics.median(samples), abs=1e-6)


@given(SAMPLES, st.floats(0, 100), st.floats(0, 100))
def test_it_never_falls(samples: list[float], one: float, other: float):
    low, high = sorted((one, other))
    assert percentile(samples, low) <= percentile(samples, high) + 1e-6


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_what_has_no_percentile_is_refused(samples: list[float], percent: float):
    with pytest.raises(ValueError, match="expected samples"):
        percentile(samples, percent)
