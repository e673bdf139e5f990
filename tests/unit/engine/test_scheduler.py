import pytest

from engine.cache.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.errors import (
    CacheTooSmall,
    DuplicateSequence,
    IntegrityError,
    InvalidSequence,
    PromptTooLong,
)
from engine.outputs import SampledTokens, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceStatus
from tests.fakes.executor import FakeExecutor, expected_completion

BLOCK_SIZE = 4


def sequence_of(seq_id, prompt, max_tokens=4, **fields):
    params = SamplingParams(max_tokens, stop_token_ids=fields.pop("stop_token_ids", frozenset()))
    return Sequence(seq_id, list(prompt), len(prompt), params, **fields)


class Bench:
    """A scheduler with the fake executor behind it."""

    def __init__(
        self,
        *,
        num_blocks=64,
        max_num_sequences=8,
        max_num_batched_tokens=32,
        itl_budget_ms=None,
        context=64,
    ):
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE, enable_prefix_cache=True)
        config = SchedulerConfig(max_num_sequences, max_num_batched_tokens, itl_budget_ms)
        self.scheduler = Scheduler(config, PagedSpace(self.allocator, b"model"), context)
        self.executor = FakeExecutor(BLOCK_SIZE)
        self.outputs = []

    def add(self, *arguments, **fields):
        sequence = sequence_of(*arguments, **fields)
        self.scheduler.add(sequence)
        return sequence

    def step(self):
        batch = self.scheduler.schedule()
        outputs = self.scheduler.postprocess(batch, self.executor.execute(batch))
        self.outputs += outputs
        self.scheduler.check_integrity()
        return batch

    def drain(self, max_num_steps=500):
        num_steps = 0
        while self.scheduler.has_work:
            self.step()
            num_steps += 1
            assert num_steps <= max_num_steps
        return num_steps

    def completion(self, seq_id):
        return [t for output in self.outputs if output.seq_id == seq_id for t in output.token_ids]


def chunks(batch):
    return [(e.sequence.seq_id, e.start, e.num_new_tokens) for e in batch.scheduled]


def test_prompt_is_prefilled_in_chunks_then_decoded():
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", range(10), max_tokens=3)
    assert chunks(bench.step()) == [("a", 0, 8)]
    assert chunks(bench.step()) == [("a", 8, 2)]
    assert chunks(bench.step()) == [("a", 10, 1)]
    assert bench.drain() == 1
    assert bench.completion("a") == expected_completion(range(10), 3, 97)
    assert [output.finish_reason for output in bench.outputs] == [None, None, FinishReason.LENGTH]


def test_decodes_go_first_and_prefill_gets_the_rest():
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", range(4), max_tokens=8)
    bench.step()
    bench.add("b", range(20, 40))
    assert chunks(bench.step()) == [("a", 4, 1), ("b", 0, 7)]


def test_stop_token_is_kept_counted_and_last():
    (stop,) = expected_completion(range(5), 1, 97)
    bench = Bench()
    sequence = bench.add("a", range(5), stop_token_ids=frozenset({stop}))
    bench.drain()
    assert sequence.finish_reason is FinishReason.STOP_TOKEN
    assert bench.completion("a") == [stop]
    assert bench.outputs[-1].usage.completion_tokens == 1


def test_max_tokens_0_warms_the_cache_and_says_nothing():
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", range(16), max_tokens=0)
    assert bench.drain() == 2
    (output,) = bench.outputs
    assert output.finish_reason is FinishReason.LENGTH
    assert (output.token_ids, output.usage.completion_tokens) == ((), 0)
    bench.add("b", range(17), max_tokens=1)
    bench.drain()
    assert bench.outputs[-1].usage.cached_tokens == 16


def test_completion_is_cached_too():
    bench = Bench()
    first = bench.add("a", range(6), max_tokens=7)
    bench.drain()
    bench.add("b", [*first.token_ids, 9], max_tokens=1)
    bench.drain()
    assert bench.outputs[-1].usage.cached_tokens == 12


def test_tenants_do_not_see_each_others_cache():
    bench = Bench()
    bench.add("a", range(16), max_tokens=1, cache_salt=b"ours")
    bench.drain()
    for salt, cached_tokens in ((b"theirs", 0), (b"ours", 12)):
        bench.add("b", range(16), max_tokens=1, cache_salt=salt)
        bench.drain()
        assert bench.outputs[-1].usage.cached_tokens == cached_tokens


def test_smaller_priority_is_admitted_first():
    bench = Bench(max_num_sequences=1)
    bench.add("late", range(4), priority=1)
    bench.add("soon", range(4), priority=0)
    assert chunks(bench.step()) == [("soon", 0, 4)]


def test_youngest_is_preempted_and_comes_back_first():
    bench = Bench(num_blocks=7, context=24)
    old = bench.add("old", range(8), max_tokens=16)
    young = bench.add("young", range(50, 58), max_tokens=10)
    bench.step()
    behind = bench.add("behind", range(90, 94), max_tokens=1)
    while not young.num_preemptions:
        batch = bench.step()
    assert batch.preempted == ("young",)
    assert old.num_preemptions == 0
    assert (young.status, young.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    assert behind.status is SequenceStatus.WAITING
    bench.drain()
    assert bench.completion("old") == expected_completion(range(8), 16, 97)
    assert bench.completion("young") == expected_completion(range(50, 58), 10, 97)
    order = [output.seq_id for output in bench.outputs if output.finish_reason]
    assert order.index("old") < order.index("young")
    assert bench.allocator.num_referenced_blocks == 0


def test_a_prefilling_sequence_can_be_the_victim():
    bench = Bench(num_blocks=9, max_num_sequences=2, max_num_batched_tokens=2, context=32)
    bench.add("old", range(4), max_tokens=28)
    bench.step()
    bench.step()
    young = bench.add("young", range(40, 60), max_tokens=4)
    while not young.num_preemptions:
        assert not young.num_completion_tokens
        bench.step()
    bench.drain()
    assert bench.completion("young") == expected_completion(range(40, 60), 4, 97)


def test_an_older_prefill_is_kept_a_block_by_younger_decodes():
    bench = Bench(num_blocks=11, max_num_sequences=2, max_num_batched_tokens=2, context=36)
    old = bench.add("old", range(24), max_tokens=4, priority=0)
    bench.add("young", [90], max_tokens=30, priority=1)
    while bench.scheduler.has_work:
        before = old.num_computed_tokens
        bench.step()
        assert old.status is SequenceStatus.FINISHED or old.num_computed_tokens > before
    assert bench.completion("young") == expected_completion([90], 30, 97)


def test_long_prompt_is_not_starved_by_a_stream_of_short_ones():
    bench = Bench(max_num_sequences=4, max_num_batched_tokens=8)
    long = bench.add("long", range(48), max_tokens=1)
    num_steps = 0
    while long.status is not SequenceStatus.FINISHED:
        for index in range(3):
            bench.add(f"short{num_steps}.{index}", [60 + num_steps, index], max_tokens=1)
        bench.step()
        num_steps += 1
    assert num_steps <= 48 // 4
    assert any(output.seq_id.startswith("short") for output in bench.outputs)


def test_a_time_budget_binds_while_somebody_decodes_and_leaves_the_oldest_a_block():
    bench = Bench(itl_budget_ms=1e-3, context=128)
    bench.add("long", range(97), max_tokens=1)
    assert chunks(bench.step()) == [("long", 0, 32)]
    bench.add("a", range(60, 63), max_tokens=3)
    assert chunks(bench.step()) == [("long", 32, 28), ("a", 0, 3)]
    bench.add("short", range(70, 73), max_tokens=1)
    assert chunks(bench.step()) == [("a", 3, 1), ("long", 60, 4)]
    assert chunks(bench.step()) == [("a", 4, 1), ("long", 64, 4)]
    assert chunks(bench.step()) == [("long", 68, 29), ("short", 0, 3)]
    bench.drain()
    assert bench.completion("a") == expected_completion(range(60, 63), 3, 97)


def test_a_measured_step_changes_the_next_chunk_only_with_a_time_budget():
    for itl_budget_ms, num_tokens in ((None, 31), (20.0, 28), (4.0, 4)):
        bench = Bench(itl_budget_ms=itl_budget_ms)
        bench.add("a", range(4), max_tokens=8)
        bench.scheduler.observe(bench.step(), 0.010)
        bench.add("long", range(10, 60), max_tokens=1)
        assert chunks(bench.step())[1] == ("long", 0, num_tokens)


@pytest.mark.parametrize("itl_budget_ms", [0.0, -1.0, float("nan")])
def test_a_time_budget_is_greater_than_0(itl_budget_ms):
    with pytest.raises(ValueError, match="itl_budget_ms must be greater than 0, got"):
        Bench(itl_budget_ms=itl_budget_ms)


def test_sequence_of_the_whole_context_runs_in_the_smallest_pool():
    bench = Bench(num_blocks=9, context=32)
    bench.add("a", range(20), max_tokens=12)
    bench.add("b", range(50, 70), max_tokens=12)
    bench.drain()
    assert bench.completion("a") == expected_completion(range(20), 12, 97)
    assert bench.completion("b") == expected_completion(range(50, 70), 12, 97)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_in_any_state_frees_everything(num_steps):
    bench = Bench(max_num_batched_tokens=8)
    sequence = bench.add("a", range(10), max_tokens=9)
    for _ in range(num_steps):
        bench.step()
    assert bench.scheduler.abort("a") is sequence
    assert sequence.finish_reason is FinishReason.ABORT
    assert bench.allocator.num_referenced_blocks == 0
    assert not bench.scheduler.has_work
    assert bench.scheduler.abort("a") is None
    bench.scheduler.check_integrity()


def test_token_of_a_sequence_aborted_during_the_step_is_dropped():
    bench = Bench()
    aborted = bench.add("a", range(5))
    bench.add("b", range(7))
    batch = bench.scheduler.schedule()
    sampled = bench.executor.execute(batch)
    bench.scheduler.abort("a")
    again = bench.add("a", range(5))
    (output,) = bench.scheduler.postprocess(batch, sampled)
    assert output.seq_id == "b"
    assert list(output.token_ids) == expected_completion(range(7), 1, 97)
    assert (aborted.num_completion_tokens, again.num_completion_tokens) == (0, 0)
    bench.drain()
    assert bench.completion("a") == expected_completion(range(5), 4, 97)


def test_logprobs_are_passed_on():
    bench = Bench()
    bench.add("a", range(5), max_tokens=1)
    logprobs = TokenLogprobs(-0.5, ((7, -0.5),))
    batch = bench.scheduler.schedule()
    (output,) = bench.scheduler.postprocess(batch, SampledTokens((7,), (logprobs,)))
    assert output.logprobs == (logprobs,)


def test_refusals_say_the_numbers():
    bench = Bench()
    with pytest.raises(PromptTooLong, match=r"60 tokens \+ max_tokens 5 = 65 .* context of 64"):
        bench.add("a", range(60), max_tokens=5)
    with pytest.raises(InvalidSequence, match="empty prompt"):
        bench.add("a", [])
    bench.add("a", range(60), max_tokens=4)
    with pytest.raises(DuplicateSequence, match="sequence a is already"):
        bench.add("a", range(4))


def test_pool_must_hold_the_context_and_a_block():
    with pytest.raises(CacheTooSmall, match=r"16 blocks of 4 = 64 tokens.*64.*need 68"):
        Bench(num_blocks=16)


def test_budget_must_cover_every_sequence():
    with pytest.raises(ValueError, match="got 9 and 8"):
        Bench(max_num_sequences=9, max_num_batched_tokens=8)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda s, a: s._sequences.clear(), "different sequences"),
        (lambda s, a: setattr(a, "status", SequenceStatus.WAITING), "a is not running"),
        (lambda s, a: setattr(a, "num_computed_tokens", 99), "99 of 9 tokens computed"),
        (lambda s, a: a.block_hashes.reverse(), "a reads block .*, which holds other tokens"),
        (lambda s, a: setattr(s._waiting[0], "num_computed_tokens", 1), "b waits, and is computed"),
        (lambda s, a: s._waiting[0].block_table.append(0), "b waits and owns blocks"),
        (lambda s, a: s._waiting.reverse(), "waiting is not sorted by age"),
        (lambda s, a: setattr(s, "_config", SchedulerConfig(0, 1)), "1 sequences run"),
        (lambda s, a: a.block_table.pop(), "counts 1 references, tables hold 0"),
    ],
)
def test_check_integrity_names_what_disagrees(damage, complaint):
    bench = Bench(max_num_sequences=1)
    sequence = bench.add("a", range(8))
    bench.add("b", range(8))
    bench.add("c", range(8))
    bench.step()
    damage(bench.scheduler, sequence)
    with pytest.raises(IntegrityError, match=complaint):
        bench.scheduler.check_integrity()
