import random
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledSequence
from engine.scheduling.cost_model import (
    FIRST_ERROR,
    FIRST_GUESS,
    LEAST_ERROR,
    CostModel,
    StepShape,
    _nearest_nonnegative,
    num_attended,
    shape_of,
)
from engine.sequence import Sequence

DECODES = StepShape(0, 0, 16_000)
CHUNK = StepShape(1_024, num_attended(1_024, 50_000), 16_000)
PLANTED = (
    FIRST_GUESS,
    (20e-3, 1e-3, 500e-9, 100e-9),  # 100 times the attention that is guessed first
    (1e-3, 26e-6, 0.0, 0.0),
    (5e-3, 0.0, 10e-9, 30e-9),
)


def seconds_of(shape, coefficients):
    base, per_token, per_attended, per_decode_context = coefficients
    return (
        base
        + per_token * shape.num_prefill_tokens
        + per_attended * shape.num_attended
        + per_decode_context * shape.num_decode_context
    )


def shapes(rng, num_steps):
    for _ in range(num_steps):
        num_tokens, start = rng.choice((0, 64, 256, 2_048)), rng.randrange(100_000)
        num_context = rng.randrange(33) * rng.randrange(100, 8_000)
        yield StepShape(num_tokens, num_attended(num_tokens, start), num_context)


def feed(model, coefficients, *, seed, num_steps=600, noise=0.03):
    """Every fiftieth step stumbles, and takes ten times as long."""
    rng = random.Random(seed)
    for shape in shapes(rng, num_steps):
        stumble = 10 if rng.random() < 0.02 else 1
        model.observe(shape, seconds_of(shape, coefficients) * rng.gauss(1, noise) * stumble)


def largest_error(model, coefficients):
    """Of the predictions, over many shapes: coefficients may trade what no shape can tell."""
    return max(
        abs(model.predict(shape) / seconds_of(shape, coefficients) - 1)
        for shape in shapes(random.Random(99), 200)
    )


def test_a_profile_tells_how_far_to_trust_it():
    exact = [(shape, seconds_of(shape, PLANTED[0])) for shape in shapes(random.Random(3), 12)]
    rough = [(shape, seconds * (1.4 if n % 2 else 1.0)) for n, (shape, seconds) in enumerate(exact)]
    assert CostModel().error == FIRST_ERROR
    assert CostModel(exact).error < 0.01
    assert 0.05 < CostModel(rough).error <= FIRST_ERROR
    assert CostModel(exact).target_for(0.05) == pytest.approx(0.05 / (1 + 3 * LEAST_ERROR))


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_coefficients_are_found_through_noise_and_stumbles(planted):
    model = CostModel()
    feed(model, planted, seed=1, noise=0.01)
    for found, coefficient in zip(model.coefficients, planted, strict=True):
        assert found == pytest.approx(coefficient, rel=0.08, abs=1e-9)
    feed(model, planted, seed=2, noise=0.05)
    assert largest_error(model, planted) < 0.08


def test_a_drift_is_followed():
    model = CostModel()
    feed(model, PLANTED[0], seed=1)
    for factor in (3.0, 0.5):
        drifted = tuple(factor * coefficient for coefficient in PLANTED[0])
        feed(model, drifted, seed=2, num_steps=400)
        assert largest_error(model, drifted) < 0.05


def test_the_error_is_that_of_the_noise():
    model = CostModel()
    assert model.error == FIRST_ERROR
    rng = random.Random(3)
    for shape in shapes(rng, 800):
        model.observe(shape, seconds_of(shape, FIRST_GUESS) * rng.gauss(1, 0.05))
    assert model.error == pytest.approx(0.05 * (2 / np.pi) ** 0.5, rel=0.3)
    assert model.target_for(0.05) == 0.05 / (1 + 3 * model.error)


def test_the_same_observations_make_the_same_model():
    one, other = CostModel(), CostModel()
    feed(one, PLANTED[1], seed=4)
    feed(other, PLANTED[1], seed=4)
    assert one.coefficients == other.coefficients
    assert one.error == other.error


def test_the_first_step_gives_the_scale():
    model = CostModel()
    model.observe(DECODES, 100 * seconds_of(DECODES, FIRST_GUESS))
    assert model.predict(CHUNK) == pytest.approx(100 * seconds_of(CHUNK, FIRST_GUESS))


def test_a_first_step_that_stumbled_is_forgotten_at_once():
    model = CostModel()
    model.observe(CHUNK, 1_000 * seconds_of(CHUNK, FIRST_GUESS))
    model.observe(CHUNK, seconds_of(CHUNK, FIRST_GUESS))
    assert model.predict(CHUNK) == pytest.approx(seconds_of(CHUNK, FIRST_GUESS), rel=0.01)


def test_a_profile_is_believed_as_it_is():
    planted = PLANTED[1]
    profile = [
        StepShape(num_tokens, num_attended(num_tokens, start), num_context)
        for num_tokens in (64, 2_048)
        for start in (0, 9_000)
        for num_context in (0, 50_000)
    ]
    model = CostModel((shape, seconds_of(shape, planted)) for shape in profile)
    assert model.coefficients == pytest.approx(planted, rel=0.02)


def test_one_stumble_is_hardly_believed_and_many_are():
    model = CostModel()
    feed(model, FIRST_GUESS, seed=5)
    before = model.predict(CHUNK)
    model.observe(CHUNK, 50 * before)
    assert model.predict(CHUNK) < 1.1 * before
    for _ in range(200):
        model.observe(CHUNK, 5 * before)
    assert model.predict(CHUNK) == pytest.approx(5 * before, rel=0.05)


def test_while_a_slow_down_is_not_yet_believed_its_errors_keep_steps_in_their_time():
    model = CostModel()
    feed(model, FIRST_GUESS, seed=5)
    seconds = 2 * model.predict(CHUNK)
    for _ in range(20):
        model.observe(CHUNK, seconds)
    assert model.predict(CHUNK) < 0.9 * seconds
    assert seconds / model.predict(CHUNK) * model.target_for(0.05) < 0.05


def test_decodes_alone_do_not_wash_out_what_a_chunk_costs():
    model = CostModel()
    feed(model, PLANTED[1], seed=6)
    rng = random.Random(7)
    for _ in range(20_000):
        shape = StepShape(0, 0, rng.randrange(1_000, 64_000))
        model.observe(shape, seconds_of(shape, PLANTED[1]) * rng.gauss(1, 0.03))
    assert model.predict(CHUNK) == pytest.approx(seconds_of(CHUNK, PLANTED[1]), rel=0.05)


def test_steps_that_no_coefficients_explain_leave_them_nonnegative_and_finite():
    model = CostModel()
    rng = random.Random(8)
    for shape in shapes(rng, 2_000):
        model.observe(shape, 10 ** rng.uniform(-9, 6))
        assert min(model.coefficients) >= 0
        assert max(model.coefficients) < inf
        assert 0 < model.error < 1


@given(st.integers(0, 1_000))
def test_the_constrained_estimate_is_the_least_squares(seed):
    """The conditions of Karush, Kuhn and Tucker."""
    rng = np.random.default_rng(seed)
    rows = rng.exponential(size=(6, 4))
    information = rows.T @ rows
    estimate = rng.normal(size=4)
    found = _nearest_nonnegative(estimate, information)
    assert (found >= 0).all()
    gradient = information @ (found - estimate)
    assert (gradient >= -1e-9).all()
    assert abs(gradient @ found) < 1e-9


@pytest.mark.parametrize("seconds", [0.0, -1.0, nan, inf])
def test_a_clock_that_stood_still_is_not_believed(seconds):
    model = CostModel()
    model.observe(DECODES, seconds)
    assert model.coefficients == FIRST_GUESS


@given(
    coefficients=st.tuples(*[st.sampled_from([0.0, 1e-9, 1e-7, 1e-4])] * 2),
    seconds=st.floats(-1, 10) | st.just(inf),
    start=st.integers(0, 200_000),
    max_tokens=st.integers(0, 8_192),
)
def test_the_largest_chunk_is_the_largest(coefficients, seconds, start, max_tokens):
    model = CostModel()
    model._per_token, model._per_attended = coefficients
    num_tokens = model.largest_chunk(seconds, start, max_tokens)
    assert 0 <= num_tokens <= max_tokens
    if num_tokens:
        assert model.predict_chunk(num_tokens, start) <= seconds * (1 + 1e-9)
    if num_tokens < max_tokens:
        assert model.predict_chunk(num_tokens + 1, start) >= seconds * (1 - 1e-9)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=6), st.integers(0, 100_000))
def test_a_prompt_costs_the_same_however_it_is_cut(chunks, start):
    model, at, cost = CostModel(), start, 0.0
    for num_tokens in chunks:
        cost += model.predict_chunk(num_tokens, at)
        at += num_tokens
    assert cost == pytest.approx(model.predict_chunk(sum(chunks), start))


def test_the_shape_counts_pairs_of_chunks_and_contexts_of_decodes():
    sequence = Sequence("a", [0] * 100, 100, SamplingParams(1))
    chunks = [ScheduledSequence(sequence, *each) for each in ((0, 4), (10, 2), (30, 1), (99, 1))]
    assert shape_of(chunks) == StepShape(6, (1 + 2 + 3 + 4) + (11 + 12), 31 + 100)
    assert shape_of([]) == StepShape(0, 0, 0)
