from engine.outputs import Usage
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def sequence_of(num_prompt_tokens, num_completion_tokens, num_computed_tokens):
    return Sequence(
        "s",
        list(range(num_prompt_tokens + num_completion_tokens)),
        num_prompt_tokens,
        SamplingParams(8),
        num_computed_tokens=num_computed_tokens,
    )


def test_counts_follow_the_tokens():
    sequence = sequence_of(5, 2, 6)
    assert sequence.num_tokens == 7
    assert sequence.num_completion_tokens == 2
    assert sequence.num_uncomputed_tokens == 1


def test_decoding_starts_with_the_first_sampled_token():
    assert not sequence_of(5, 0, 4).is_decoding
    assert sequence_of(5, 1, 5).is_decoding


def test_a_preempted_sequence_prefills_again():
    assert not sequence_of(5, 3, 0).is_decoding


def test_usage_keeps_prompt_and_completion_apart():
    sequence = sequence_of(5, 2, 6)
    sequence.num_cached_tokens = 4
    assert sequence.usage == Usage(prompt_tokens=5, cached_tokens=4, completion_tokens=2)


def test_sequences_are_themselves_and_nothing_else():
    assert sequence_of(1, 0, 0) != sequence_of(1, 0, 0)
