import math

import pytest

from engine.errors import InvalidSamplingParams, InvalidSequence
from engine.sampling_params import MAX_NUM_LOGPROBS, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("num_logprobs", -1),
        ("num_logprobs", MAX_NUM_LOGPROBS + 1),
    ],
)
def test_out_of_range_is_refused_by_name_and_value(name, value):
    with pytest.raises(InvalidSamplingParams, match=f"{name} must be .*, got {value}"):
        SamplingParams(**{"max_tokens": 1, name: value})


def test_edges_of_every_range_are_accepted():
    low = SamplingParams(
        0,
        temperature=0.0,
        top_k=1,
        top_p=1e-6,
        min_p=0.0,
        repetition_penalty=1e-3,
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
        num_logprobs=0,
    )
    high = SamplingParams(
        1 << 20, top_p=1.0, min_p=1.0, presence_penalty=2.0, num_logprobs=MAX_NUM_LOGPROBS
    )
    assert low.is_greedy
    assert not high.is_greedy


def test_penalties_are_off_until_one_is_set():
    assert not SamplingParams(1).has_penalties
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(1, **{name: 0.5}).has_penalties


def test_bad_params_are_the_callers_fault():
    assert issubclass(InvalidSamplingParams, InvalidSequence)
