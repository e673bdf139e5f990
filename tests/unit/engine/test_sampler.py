from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.execution.sampler import Sampler
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

PLAIN = SamplingParams(max_tokens=100)
GREEDY = replace(PLAIN, temperature=0.0)
LOGITS = torch.tensor([1.0, 3.0, -1.0, 2.0, 0.5, 2.9])


def sequence(params: SamplingParams, prompt: list[int], completion: list[int]) -> Sequence:
    return Sequence("s", prompt + completion, len(prompt), params)


def sample_one(
    params: SamplingParams,
    logits: torch.Tensor = LOGITS,
    prompt: tuple[int, ...] = (0,),
    completion: tuple[int, ...] = (),
) -> int:
    sampled = Sampler().sample(logits[None], [sequence(params, list(prompt), list(completion))])
    return sampled.token_ids[0]


def draw_many(params: SamplingParams, logits: torch.Tensor, num_draws: int) -> Counter[int]:
    """The same distribution at `num_draws` seeds."""
    sequences = [sequence(replace(params, seed=seed), [0], []) for seed in range(num_draws)]
    return Counter(Sampler().sample(logits.expand(num_draws, -1), sequences).token_ids)


def assert_follows(counts: Counter[int], expected: torch.Tensor) -> None:
    """Chi-squared at a level that a right sampler misses once in a million seeds' choices."""
    num_draws = counts.total()
    kept = expected > 0
    assert all(kept[token_id] for token_id in counts)
    observed = torch.tensor([float(counts[i]) for i in range(len(expected))])[kept]
    wanted = expected[kept] * num_draws
    assert wanted.min() >= 5
    statistic = ((observed - wanted).square() / wanted).sum()
    degrees = kept.sum() - 1
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5 + 15


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (PLAIN, [0, 1, 2, 3, 4, 5]),
        (replace(PLAIN, temperature=0.5), [0, 1, 3, 4, 5]),
        (replace(PLAIN, top_k=3), [1, 3, 5]),
        (replace(PLAIN, top_p=0.6), [1, 5]),
        (replace(PLAIN, min_p=0.2), [1, 3, 5]),
        (replace(PLAIN, min_p=0.2, top_k=2, top_p=0.99), [1, 5]),
        (replace(PLAIN, temperature=2.0, top_k=4, top_p=0.9), [0, 1, 3, 5]),
    ],
    ids=["plain", "cold", "top-k", "top-p", "min-p", "all three", "hot, cut"],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams, kept: list[int]) -> None:
    scaled = LOGITS / params.temperature
    masked = torch.full_like(scaled, float("-inf"))
    masked[kept] = scaled[kept]
    expected = masked.softmax(-1)
    if params.temperature == 0.5:
        expected[2] = LOGITS.div(0.5).softmax(-1)[2]  # kept, too rare to be expected five times
        expected[4], expected[2] = expected[4] + expected[2], 0.0
    counts = draw_many(params, LOGITS, 20_000)
    if params.temperature == 0.5:
        counts[4] += counts.pop(2, 0)

    assert_follows(counts, expected)


def test_a_wide_distribution_is_followed_too() -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 0.7
    assert_follows(draw_many(PLAIN, logits, 30_000), logits.softmax(-1))


def test_the_positions_of_one_sequence_are_independent_draws() -> None:
    logits = torch.zeros(4)
    drawn = [sample_one(PLAIN, logits, completion=(0,) * length) for length in range(1_000)]
    pairs = Counter(4 * first + second for first, second in pairwise(drawn))
    assert_follows(pairs, torch.full((16,), 1 / 16))


def test_a_flat_nucleus_keeps_all_ties() -> None:
    logits = torch.zeros(2_000)
    logits[:500] = -20.0
    counts = draw_many(replace(PLAIN, top_p=0.9), logits, 4_000)
    assert min(counts) >= 500
    assert len(counts) > 1_200


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert set(draw_many(replace(PLAIN, top_p=0.5), logits, 500)) == {0}
    assert set(draw_many(replace(PLAIN, top_p=0.51), logits, 500)) == {0, 1}
    assert set(draw_many(replace(PLAIN, top_p=0.81), logits, 500)) == {0, 1, 2}
    assert set(draw_many(replace(PLAIN, top_p=1e-9), logits, 500)) == {0}


def test_top_k_keeps_ties() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 0.0])
    assert set(draw_many(replace(PLAIN, top_k=2), logits, 500)) == {0, 1, 2}
    assert set(draw_many(replace(PLAIN, top_k=99), logits, 500)) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-5])
def test_towards_zero_temperature_is_greedy(temperature: float) -> None:
    assert sample_one(replace(PLAIN, temperature=temperature), LOGITS * 100) == 1


params_strategy = st.builds(
    SamplingParams,
    max_tokens=st.just(10),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.sampled_from([None, 1, 3, 50]),
    top_p=st.sampled_from([0.1, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    seed=st.integers(-(2**63), 2**64),
    logit_bias=st.sampled_from([(), ((3, 5.0), (7, -100.0))]),
    num_logprobs=st.sampled_from([None, 0, 4]),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(params_strategy, st.lists(st.integers(0, 63), max_size=6)), min_size=1, max_size=6
    ),
    logits_seed=st.integers(0, 1_000),
)
def test_a_draw_never_depends_on_its_batch(
    rows: list[tuple[SamplingParams, list[int]]], logits_seed: int
) -> None:
    logits = torch.randn(len(rows), 64, generator=torch.Generator().manual_seed(logits_seed)) * 3
    before = logits.clone()
    sequences = [sequence(params, [1, 2], completion) for params, completion in rows]

    together = Sampler().sample(logits, sequences)

    assert torch.equal(logits, before)
    for row, each in enumerate(sequences):
        alone = Sampler().sample(logits[row : row + 1], [each])
        assert together.token_ids[row] == alone.token_ids[0]
        assert together.logprobs[row] == alone.logprobs[0]


def test_the_same_seed_and_position_repeat_and_others_do_not() -> None:
    logits = torch.zeros(50_000)
    at = {
        (seed, length): sample_one(replace(PLAIN, seed=seed), logits, completion=(0,) * length)
        for seed in (1, 2)
        for length in (0, 1)
    }
    assert at[1, 0] == sample_one(replace(PLAIN, seed=1), logits)
    assert len(set(at.values())) == 4


def test_repetition_penalty_counts_prompt_and_completion() -> None:
    params = replace(GREEDY, repetition_penalty=8.0)
    assert sample_one(params, prompt=(1,)) == 5
    assert sample_one(params, prompt=(1,), completion=(5,)) == 3
    assert sample_one(params, prompt=(0,), completion=(1, 5, 3, 1)) == 4


def test_repetition_penalty_pushes_negative_logits_down() -> None:
    logits = torch.tensor([-1.0, -1.5])
    assert sample_one(replace(GREEDY, repetition_penalty=2.0), logits, prompt=(0,)) == 1


def test_presence_and_frequency_look_at_the_completion_only() -> None:
    presence = replace(GREEDY, presence_penalty=0.2)
    frequency = replace(GREEDY, frequency_penalty=0.06)
    for params in (presence, frequency):
        assert sample_one(params, prompt=(1, 1, 1)) == 1
    assert sample_one(presence, completion=(1,)) == 5
    assert sample_one(frequency, completion=(1,)) == 1
    assert sample_one(frequency, completion=(1, 1)) == 5


def test_logit_bias_forces_and_bans() -> None:
    assert sample_one(replace(GREEDY, logit_bias=((2, 100.0),))) == 2
    assert sample_one(replace(GREEDY, logit_bias=((1, -100.0), (5, -100.0)))) == 3
    assert set(draw_many(replace(PLAIN, logit_bias=((4, 100.0),)), LOGITS, 50)) == {4}


def test_logprobs_are_of_the_raw_distribution() -> None:
    params = replace(GREEDY, num_logprobs=2, logit_bias=((2, 100.0),), repetition_penalty=2.0)
    raw = LOGITS.log_softmax(-1)

    sampled = Sampler().sample(LOGITS[None], [sequence(params, [0], [])])

    (logprobs,) = sampled.logprobs
    assert logprobs is not None
    assert sampled.token_ids == (2,)
    assert logprobs.logprob == pytest.approx(float(raw[2]))
    assert logprobs.top == ((1, pytest.approx(float(raw[1]))), (5, pytest.approx(float(raw[5]))))


def test_logprobs_only_where_asked() -> None:
    sequences = [
        sequence(replace(GREEDY, num_logprobs=num_logprobs), [0], [])
        for num_logprobs in (None, 0, 20)
    ]

    first, second, third = Sampler().sample(LOGITS.expand(3, -1), sequences).logprobs

    assert first is None
    assert second is not None
    assert second.top == ()
    assert third is not None
    assert len(third.top) == 6  # the whole vocabulary


def test_nobody_samples() -> None:
    assert Sampler().sample(torch.zeros(0, 5), []).token_ids == ()
