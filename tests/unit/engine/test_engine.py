from dataclasses import astuple

import pytest

from engine.cache.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.engine import Engine, EngineTotals
from engine.errors import (
    DuplicateSequence,
    IntegrityError,
    InvalidSamplingParams,
    InvalidSequence,
    PromptTooLong,
)
from engine.outputs import Usage
from engine.sampling_params import SamplingParams
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason
from tests.fakes.executor import FakeExecutor, expected_completion

BLOCK_SIZE = 4
VOCAB_SIZE = 97


def engine_of(*, num_blocks=64, executor=None, context=64, **options):
    allocator = BlockAllocator(num_blocks, BLOCK_SIZE, enable_prefix_cache=True)
    scheduler = Scheduler(SchedulerConfig(8, 16), PagedSpace(allocator, b"model"), context)
    executor = executor or FakeExecutor(BLOCK_SIZE)
    return Engine(scheduler, executor, vocab_size=VOCAB_SIZE, check_integrity=True, **options)


def drain(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


def test_tokens_come_out_one_a_step_and_the_last_says_why():
    engine = engine_of()
    engine.add("a", range(5), SamplingParams(3))
    outputs = drain(engine)
    tokens = [token_id for output in outputs for token_id in output.token_ids]
    assert tokens == expected_completion(range(5), 3, VOCAB_SIZE)
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]
    assert outputs[-1].usage == Usage(5, 0, 3)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE])
def test_a_bias_for_a_token_the_model_lacks_is_refused(token_id):
    engine = engine_of()
    engine.add("a", range(5), SamplingParams(3, logit_bias=((0, 1.0), (VOCAB_SIZE - 1, 1.0))))
    with pytest.raises(InvalidSamplingParams, match=rf"in \[0, 97\), got {token_id};"):
        engine.add("b", range(5), SamplingParams(3, logit_bias=((0, 1.0), (token_id, 1.0))))
    assert len(drain(engine)) == 3


def test_stats_tell_prefill_from_decode():
    times = iter([1.0, 1.25, 2.0, 2.5])
    engine = engine_of(clock=lambda: next(times))
    assert astuple(engine.stats) == (0, 0, 0, 0, 0, 64, 64, 0.0)
    engine.add("a", range(5), SamplingParams(3))
    first = engine.step().stats
    assert (first.num_prefill_tokens, first.num_decode_tokens, first.step_ms) == (5, 0, 250.0)
    assert (first.num_running, first.num_waiting, first.num_free_blocks) == (1, 0, 62)
    engine.add("b", range(30, 50), SamplingParams(3))
    second = engine.step().stats
    assert (second.num_prefill_tokens, second.num_decode_tokens, second.step_ms) == (15, 1, 500.0)
    assert engine.stats == second


def test_the_scheduler_hears_of_whole_steps():
    times = iter([1.0, 1.25, 2.0, 2.5])
    engine = engine_of(clock=lambda: next(times))
    heard = []
    engine._scheduler.observe = lambda batch, seconds: heard.append((batch, seconds))
    engine.add("a", range(5), SamplingParams(3))
    engine.step()
    engine.step()
    assert heard == list(zip(engine._executor.batches, (0.25, 0.5), strict=True))


def test_totals_equal_the_sum_of_final_usages():
    engine = engine_of(num_blocks=12, context=32)
    outputs = []
    for index in range(6):
        engine.add(f"s{index}", range(index % 2, 14), SamplingParams(9 + index))
        outputs += engine.step().outputs
    engine.abort("s3")
    outputs += drain(engine)
    finals = [output.usage for output in outputs if output.finish_reason]
    assert engine.totals.preemptions > 0
    assert engine.totals == EngineTotals(
        sum(usage.prompt_tokens for usage in finals),
        sum(usage.cached_tokens for usage in finals),
        sum(usage.completion_tokens for usage in finals),
        6,
        engine.totals.preemptions,
    )
    assert engine.totals.cached_tokens > 0


def test_abort_gives_the_usage_now_and_the_output_with_the_next_step():
    engine = engine_of()
    engine.add("a", range(5), SamplingParams(9))
    engine.step()
    engine.step()
    assert engine.abort("a") == Usage(5, 0, 2)
    assert engine.abort("a") is None
    assert engine.has_work
    (output,) = engine.step().outputs
    assert (output.seq_id, output.finish_reason) == ("a", FinishReason.ABORT)
    assert (output.token_ids, output.usage) == ((), Usage(5, 0, 2))
    assert not engine.has_work
    assert engine.stats.num_free_blocks == 64


def test_abort_before_the_first_step_uses_nothing():
    engine = engine_of()
    engine.add("a", range(5), SamplingParams(9))
    assert engine.abort("a") == Usage(5, 0, 0)


def test_outsiders_are_refused_with_the_numbers():
    engine = engine_of()
    with pytest.raises(InvalidSequence, match=r"\[0, 97\), got 5 to 97"):
        engine.add("a", [5, 97], SamplingParams(1))
    with pytest.raises(InvalidSequence, match="got -3 to 5"):
        engine.add("a", [5, -3], SamplingParams(1))
    with pytest.raises(InvalidSequence, match="empty prompt"):
        engine.add("a", [], SamplingParams(1))
    with pytest.raises(PromptTooLong):
        engine.add("a", range(64), SamplingParams(1))
    assert not engine.has_work
    engine.add("a", [1], SamplingParams(1))
    with pytest.raises(DuplicateSequence):
        engine.add("a", [1], SamplingParams(1))


def test_executor_errors_come_through():
    engine = engine_of(executor=FakeExecutor(BLOCK_SIZE, fail_at_step=2))
    engine.add("a", range(5), SamplingParams(3))
    engine.step()
    with pytest.raises(RuntimeError, match="step 2"):
        engine.step()


def test_integrity_is_checked_after_every_step():
    engine = engine_of()
    engine.add("a", range(5), SamplingParams(3))
    engine._scheduler._space._allocator._free.pop()
    with pytest.raises(IntegrityError):
        engine.step()
