import torch

from engine.execution.inputs import build_inputs
from engine.sampling_params import SamplingParams
from tests.unit.engine.hand_batch import new_sequence, plan

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def test_a_chunk_in_the_middle_of_a_prompt() -> None:
    sequence = new_sequence(list(range(100, 110)), [7, 2, 5])
    sequence.num_computed_tokens = 3

    inputs = build_inputs(plan((sequence, 5)), BLOCK_SIZE, CPU)

    assert inputs.input_ids.tolist() == [103, 104, 105, 106, 107]
    assert inputs.positions.tolist() == [3, 4, 5, 6, 7]
    assert inputs.slot_mapping.tolist() == [31, 8, 9, 10, 11]
    assert inputs.sampled_rows.tolist() == []
    (span,) = inputs.spans
    assert (span.query_len, span.rows) == (5, slice(0, 5))
    assert span.block_tables.tolist() == [[7, 2]]  # the third block holds nothing yet
    assert span.context_lens.tolist() == [8]


def test_single_tokens_go_first_grouped_by_size_and_chunks_stay_alone() -> None:
    chunk = new_sequence(list(range(6)), [0, 1])
    long = new_sequence(list(range(20, 37)), [2, 3, 4, 5, 6])
    short = new_sequence(list(range(40, 45)), [7, 8])
    medium = new_sequence(list(range(50, 60)), [9, 10, 11])
    for decoding in (long, short, medium):
        decoding.num_computed_tokens = decoding.num_tokens - 1

    inputs = build_inputs(plan((chunk, 6), (long, 1), (short, 1), (medium, 1)), BLOCK_SIZE, CPU)

    assert inputs.input_ids.tolist() == [44, 59, 36, 0, 1, 2, 3, 4, 5]
    pairs, single, whole = inputs.spans
    assert pairs.block_tables.tolist() == [[7, 8, 0], [9, 10, 11]]
    assert pairs.context_lens.tolist() == [5, 10]
    assert single.block_tables.tolist() == [[2, 3, 4, 5, 6]]
    assert [span.rows for span in inputs.spans] == [slice(0, 2), slice(2, 3), slice(3, 9)]
    assert whole.query_len == 6
    # Tokens are wanted in the order of the batch: chunk, long, short, medium.
    assert inputs.sampled_rows.tolist() == [8, 2, 0, 1]


def test_a_warm_up_samples_nothing() -> None:
    sequence = new_sequence([1, 2], [0], SamplingParams(max_tokens=0))

    inputs = build_inputs(plan((sequence, 2)), BLOCK_SIZE, CPU)

    assert inputs.sampled_rows.shape == (0,)
    assert inputs.sampled_rows.dtype == torch.int64


def test_a_recomputed_sequence_takes_its_completion_too() -> None:
    sequence = new_sequence([1, 2, 3], [4, 5])
    sequence.token_ids += [8, 9]

    inputs = build_inputs(plan((sequence, 5)), BLOCK_SIZE, CPU)

    assert inputs.input_ids.tolist() == [1, 2, 3, 8, 9]
    assert inputs.slot_mapping.tolist() == [16, 17, 18, 19, 20]
    assert inputs.sampled_rows.tolist() == [4]
