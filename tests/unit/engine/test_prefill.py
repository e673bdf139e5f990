from hypothesis import given
from hypothesis import strategies as st

from engine.cache.block_allocator import BlockAllocator
from engine.cache.block_hash import extend_chain, root_hash
from engine.cache.spill import Restores
from engine.sampling_params import SamplingParams
from engine.scheduling.budget import Candidate, TokenBudget
from engine.scheduling.prefill import find_admissible, find_prefilling, plan_prefills
from engine.sequence import Sequence, SequenceStatus

BLOCK_SIZE = 4


def waiting_of(*num_prompt_tokens, first_token=0):
    sequences = []
    for index, num_tokens in enumerate(num_prompt_tokens):
        token_ids = [first_token + index] * num_tokens
        sequence = Sequence(
            f"s{index}", token_ids, num_tokens, SamplingParams(8), arrival_index=index
        )
        extend_chain(sequence.block_hashes, root_hash(b"", b""), token_ids, BLOCK_SIZE)
        sequences.append(sequence)
    return sequences


def allocator_of(num_blocks):
    return BlockAllocator(num_blocks, BLOCK_SIZE, enable_prefix_cache=True)


def cache(allocator, sequence, num_blocks):
    """As if an equal sequence had been here: the head of its chain is cached."""
    table = allocator.allocate(num_blocks)
    for block_id, block_hash in zip(table, sequence.block_hashes, strict=False):
        allocator.register(block_id, block_hash)
    return table


def plan(candidates, num_tokens, allocator):
    scheduled = plan_prefills(candidates, TokenBudget(num_tokens), allocator, Restores())
    return {entry.sequence.seq_id: (entry.start, entry.num_new_tokens) for entry in scheduled}


def share(budget, wanted):
    return budget.share(
        [Candidate(*each) for each in zip(waiting_of(*wanted), wanted, strict=True)]
    )


def test_oldest_gets_half_and_short_prompts_pass():
    assert share(TokenBudget(100), [500, 300, 20, 10]) == [50, 20, 20, 10]


def test_oldest_gets_what_nobody_else_wants():
    assert share(TokenBudget(100), [500, 20]) == [80, 20]


def test_half_of_one_token_is_one():
    assert share(TokenBudget(1), [5, 1]) == [1, 0]


def test_equals_are_served_in_order_of_age():
    assert share(TokenBudget(10), [3, 8, 8]) == [3, 7, 0]


@given(st.integers(0, 100), st.lists(st.integers(1, 60), max_size=6))
def test_share_is_fair_and_wastes_nothing(num_tokens, wanted):
    budget = TokenBudget(num_tokens)
    granted = share(budget, wanted)
    assert all(0 <= g <= w for g, w in zip(granted, wanted, strict=True))
    assert sum(granted) == min(num_tokens, sum(wanted)) == num_tokens - budget.num_left
    if wanted:
        assert granted[0] >= min(wanted[0], -(-num_tokens // 2))
    assert sum(0 < g < w for g, w in zip(granted[1:], wanted[1:], strict=True)) <= 1


def test_blocks_are_taken_for_the_chunk_alone():
    allocator = allocator_of(10)
    (sequence,) = waiting_of(30)
    assert plan([Candidate(sequence, 30)], 5, allocator) == {"s0": (0, 5)}
    assert len(sequence.block_table) == 2
    sequence.num_computed_tokens = 5
    assert plan(find_prefilling([sequence]), 3, allocator) == {"s0": (5, 3)}
    assert len(sequence.block_table) == 2


def test_hits_are_shared_and_counted():
    allocator = allocator_of(10)
    (sequence,) = waiting_of(11)
    cached = cache(allocator, sequence, 2)
    (candidate,) = find_admissible([sequence], [], allocator, 4, Restores())
    assert candidate.num_wanted == 3
    assert plan([candidate], 64, allocator) == {"s0": (8, 3)}
    assert sequence.block_table[:2] == cached
    assert sequence.num_cached_tokens == 8
    assert sequence.status is SequenceStatus.RUNNING


def test_last_token_of_a_cached_prompt_is_computed():
    allocator = allocator_of(10)
    (sequence,) = waiting_of(8)
    cache(allocator, sequence, 2)
    assert plan(find_admissible([sequence], [], allocator, 4, Restores()), 64, allocator) == {
        "s0": (4, 4)
    }


def test_hits_after_a_preemption_are_not_counted_as_cached():
    allocator = allocator_of(10)
    (sequence,) = waiting_of(11)
    sequence.num_preemptions = 1
    cache(allocator, sequence, 2)
    assert plan(find_admissible([sequence], [], allocator, 4, Restores()), 64, allocator) == {
        "s0": (8, 3)
    }
    assert sequence.num_cached_tokens == 0


def test_admission_wants_room_for_the_prompt_and_growth():
    allocator = allocator_of(8)
    waiting = waiting_of(12, 12, 1)
    found = find_admissible(waiting, [], allocator, 4, Restores())
    assert [candidate.sequence for candidate in found] == waiting[:2]


def test_what_running_prefills_still_need_is_not_given_away():
    allocator = allocator_of(8)
    running, waiting = waiting_of(20, 8)
    plan(find_admissible([running], [], allocator, 4, Restores()), 4, allocator)
    assert allocator.num_free_blocks == 7
    assert find_admissible([waiting], [running], allocator, 4, Restores()) == []


def test_a_referenced_prefix_needs_no_room():
    allocator = allocator_of(8)
    (sequence,) = waiting_of(21)
    cache(allocator, sequence, 5)
    assert len(find_admissible([sequence], [], allocator, 4, Restores())) == 1
    assert len(find_admissible([sequence], waiting_of(1), allocator, 4, Restores())) == 0


def test_alone_a_sequence_needs_no_room_to_grow():
    allocator = allocator_of(5)
    assert len(find_admissible(waiting_of(20, 1), [], allocator, 4, Restores())) == 1


def test_one_that_does_not_fit_holds_back_those_behind_it():
    allocator = allocator_of(6)
    assert len(find_admissible(waiting_of(4, 16, 4), [], allocator, 4, Restores())) == 1


def test_no_more_than_max_num_sequences():
    allocator = allocator_of(50)
    assert len(find_admissible(waiting_of(1, 1, 1), [], allocator, 2, Restores())) == 2
    assert find_admissible(waiting_of(1), waiting_of(1, 1), allocator, 2, Restores()) == []


def test_without_a_grant_a_candidate_keeps_waiting():
    allocator = allocator_of(50)
    waiting = waiting_of(20, 20)
    assert plan(find_admissible(waiting, [], allocator, 4, Restores()), 8, allocator) == {
        "s0": (0, 8)
    }
    assert waiting[1].status is SequenceStatus.WAITING
    assert waiting[1].block_table == []


def test_a_chunk_shrinks_to_the_blocks_left():
    allocator = allocator_of(3)
    first, second = waiting_of(20, 20)
    first.status = second.status = SequenceStatus.RUNNING
    assert plan(find_prefilling([first, second]), 100, allocator) == {"s0": (0, 12)}


def test_hits_lost_between_the_two_looks_are_computed():
    allocator = allocator_of(8)
    older, sequence, other = waiting_of(20, 9, 24)
    older.status = SequenceStatus.RUNNING
    allocator.free(cache(allocator, sequence, 2))
    allocator.free(cache(allocator, other, 6))
    candidates = [
        *find_prefilling([older]),
        *find_admissible([sequence], [], allocator, 4, Restores()),
    ]
    assert [candidate.num_wanted for candidate in candidates] == [20, 1]
    assert plan(candidates, 64, allocator) == {"s0": (0, 20), "s1": (0, 1)}
    assert sequence.num_cached_tokens == 0
    allocator.check_integrity([older.block_table, sequence.block_table])
