import threading

import pytest

from engine.async_engine import AsyncEngine
from engine.cache.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.errors import DuplicateSequence, EngineStopped, InvalidSequence
from engine.outputs import Usage
from engine.sampling_params import SamplingParams
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason
from tests.fakes.executor import FakeExecutor, expected_completion

BLOCK_SIZE = 4
PATIENCE_S = 20.0  # no test waits that long unless it fails


class Gate:
    """Holds every step of the executor until it is let through."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)

    def __call__(self):
        self.entered.release()
        assert self.allowed.acquire(timeout=PATIENCE_S)

    def wait_for_step(self):
        assert self.entered.acquire(timeout=PATIENCE_S)

    def open(self, num_steps=10_000):
        self.allowed.release(num_steps)


class ManualClock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def start():
    """Start engines; each is shut down at the end, its gate opened."""
    started = []

    def start(*, gate=None, fail_at_step=None, **options):
        allocator = BlockAllocator(64, BLOCK_SIZE, enable_prefix_cache=True)
        scheduler = Scheduler(SchedulerConfig(4, 16), PagedSpace(allocator, b"model"), 128)
        executor = FakeExecutor(
            BLOCK_SIZE, fail_at_step=fail_at_step, before_step=gate or (lambda: None)
        )
        engine = AsyncEngine(
            Engine(scheduler, executor, vocab_size=97, check_integrity=True), **options
        )
        started.append((engine, gate))
        return engine

    yield start
    for engine, gate in started:
        if gate is not None:
            gate.open()
        engine.shutdown(PATIENCE_S)
        assert engine.has_stopped


class Reader:
    """Collects outputs by sequence."""

    def __init__(self, engine):
        self.engine = engine
        self.outputs = {}

    def read(self):
        steps = self.engine.next_outputs(PATIENCE_S)
        assert steps, "nothing came"
        for step in steps:
            for output in step.outputs:
                self.outputs.setdefault(output.seq_id, []).append(output)
        return steps

    def read_until_finished(self, *seq_ids):
        while not all(self.final(seq_id) for seq_id in seq_ids):
            self.read()

    def final(self, seq_id):
        last = self.outputs.get(seq_id, [None])[-1]
        return last if last is not None and last.finish_reason else None

    def completion(self, seq_id):
        return [token for output in self.outputs[seq_id] for token in output.token_ids]


def test_sequences_run_to_their_end(start):
    engine = start()
    reader = Reader(engine)
    for index in range(8):
        engine.add(f"s{index}", range(index, 20), SamplingParams(10))
    reader.read_until_finished(*(f"s{index}" for index in range(8)))
    for index in range(8):
        expected = expected_completion(range(index, 20), 10, 97)
        assert reader.completion(f"s{index}") == expected
    assert engine.totals.completion_tokens == 80
    assert engine.stats.num_running == 0


def test_many_threads_add_and_abort(start):
    engine = start()
    reader = Reader(engine)
    usages = {}

    def serve(worker):
        for index in range(20):
            seq_id = f"{worker}.{index}"
            engine.add(seq_id, range(worker, 12), SamplingParams(30))
            if index % 2:
                usages[seq_id] = engine.abort(seq_id)

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    everyone = [f"{worker}.{index}" for worker in range(4) for index in range(20)]
    reader.read_until_finished(*everyone)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(usages) == 40
    for seq_id in everyone:
        final = reader.final(seq_id)
        assert sum(output.finish_reason is not None for output in reader.outputs[seq_id]) == 1
        assert len(reader.completion(seq_id)) == final.usage.completion_tokens
        if usages.get(seq_id) is not None:
            assert (final.finish_reason, final.usage) == (FinishReason.ABORT, usages[seq_id])
        else:
            assert final.finish_reason is FinishReason.LENGTH
    finals = [reader.final(seq_id).usage for seq_id in everyone]
    assert engine.totals.completion_tokens == sum(usage.completion_tokens for usage in finals)
    assert engine.totals.finished_sequences == 80


def test_refusals_reach_the_caller_while_a_step_runs(start):
    gate = Gate()
    engine = start(gate=gate)
    engine.add("a", range(5), SamplingParams(3))
    gate.wait_for_step()
    with pytest.raises(DuplicateSequence):
        engine.add("a", range(5), SamplingParams(3))
    with pytest.raises(InvalidSequence):
        engine.add("b", [], SamplingParams(3))
    engine.add("c", range(5), SamplingParams(3))


def test_abort_takes_effect_within_the_step(start):
    gate = Gate()
    engine = start(gate=gate)
    engine.add("a", range(5), SamplingParams(50))
    gate.wait_for_step()
    answer = []
    aborting = threading.Thread(target=lambda: answer.append(engine.abort("a")))
    aborting.start()
    # The abort is queued before the step may end: the loop cannot start another one first.
    with engine._changed:
        assert engine._changed.wait_for(lambda: engine._aborts, PATIENCE_S)
    gate.open(1)
    aborting.join(PATIENCE_S)
    assert answer == [Usage(5, 0, 1)]
    reader = Reader(engine)
    reader.read_until_finished("a")
    assert reader.final("a").usage == Usage(5, 0, 1)
    assert engine.abort("a") is None
    assert not gate.entered.acquire(blocking=False)


def test_an_aborted_id_can_be_used_again_at_once(start):
    engine = start()
    reader = Reader(engine)
    engine.add("a", range(5), SamplingParams(60))
    assert engine.abort("a").prompt_tokens == 5
    engine.add("a", range(9), SamplingParams(60))
    assert engine.abort("a").prompt_tokens == 9
    engine.add("a", range(7), SamplingParams(2))
    while reader.final("a") is None or reader.final("a").usage.prompt_tokens != 7:
        reader.read()
    reasons = [o.finish_reason for o in reader.outputs["a"] if o.finish_reason]
    assert reasons == [FinishReason.ABORT, FinishReason.ABORT, FinishReason.LENGTH]


def test_a_sequence_added_and_aborted_while_another_is_aborted_ends_aborted(start):
    engine = start()
    answers = {}
    abort_now = engine._engine.abort

    def abort_slowly(seq_id):
        """On the loop's thread: "b" comes and goes between the loop's looks at its queues."""
        if seq_id == "a":
            engine.add("b", range(5), SamplingParams(60))
            abort_b.start()
            with engine._changed:
                assert engine._changed.wait_for(lambda: len(engine._aborts) == 2, PATIENCE_S)
        return abort_now(seq_id)

    engine._engine.abort = abort_slowly
    abort_b = threading.Thread(target=lambda: answers.update(b=engine.abort("b")))
    engine.add("a", range(5), SamplingParams(60))
    answers["a"] = engine.abort("a")
    abort_b.join(PATIENCE_S)
    assert answers["a"].prompt_tokens == 5
    assert answers["b"] == Usage(5, 0, 0)
    reader = Reader(engine)
    reader.read_until_finished("a", "b")
    assert reader.final("b").finish_reason is FinishReason.ABORT


def test_unknown_and_finished_sequences_have_nothing_to_abort(start):
    engine = start()
    assert engine.abort("nobody") is None
    engine.add("a", range(5), SamplingParams(1))
    Reader(engine).read_until_finished("a")
    assert engine.abort("a") is None


def test_outputs_are_coalesced_for_a_slow_reader(start):
    engine = start(max_pending_steps=100)
    engine.add("a", range(5), SamplingParams(40))
    with engine._changed:
        assert engine._changed.wait_for(lambda: len(engine._outbox) == 40, PATIENCE_S)
    assert len(engine.next_outputs(0)) == 40
    assert engine.next_outputs(0) == []


def test_loop_waits_for_a_reader_that_is_far_behind_but_aborts(start):
    engine = start(max_pending_steps=3)
    engine.add("a", range(5), SamplingParams(50))
    engine.add("b", range(6), SamplingParams(50))
    with engine._changed:
        assert engine._changed.wait_for(lambda: len(engine._outbox) == 3, PATIENCE_S)
    assert engine.abort("a") == Usage(5, 0, 3)
    assert len(engine._outbox) == 3
    reader = Reader(engine)
    assert len(reader.read()) == 3
    reader.read_until_finished("a", "b")
    assert reader.completion("b") == expected_completion(range(6), 50, 97)


def test_progress_is_measured_only_while_there_is_work(start):
    gate, clock = Gate(), ManualClock()
    engine = start(gate=gate, clock=clock)
    clock.now_s += 50
    assert engine.last_progress_s == 0.0
    engine.add("a", range(5), SamplingParams(2))
    gate.wait_for_step()
    assert engine.last_progress_s == 0.0
    clock.now_s += 7
    assert engine.last_progress_s == 7.0
    gate.open(1)
    gate.wait_for_step()
    assert engine.last_progress_s == 0.0
    clock.now_s += 3
    assert engine.last_progress_s == 3.0
    gate.open(1)
    Reader(engine).read_until_finished("a")
    assert engine.last_progress_s == 0.0


def test_executor_error_stops_the_engine_for_everybody(start):
    gate = Gate()
    engine = start(gate=gate, fail_at_step=2)
    engine.add("a", range(5), SamplingParams(9))
    gate.wait_for_step()
    gate.open(1)
    gate.wait_for_step()
    answer = []
    aborting = threading.Thread(target=lambda: answer.append(engine.abort("a")))
    aborting.start()
    with engine._changed:
        assert engine._changed.wait_for(lambda: engine._aborts, PATIENCE_S)
    gate.open(1)
    aborting.join(PATIENCE_S)
    assert answer == [None]
    (step,) = engine.next_outputs(PATIENCE_S)
    assert len(step.outputs) == 1
    for call in (engine.next_outputs, lambda: engine.add("b", range(5), SamplingParams(9))):
        with pytest.raises(EngineStopped, match="fake failure at step 2") as stopped:
            call()
        assert isinstance(stopped.value.__cause__, RuntimeError)
    assert engine.has_stopped
    assert engine.abort("a") is None
    assert engine.last_progress_s == 0.0


def test_reader_that_waits_learns_of_the_failure(start):
    gate = Gate()
    engine = start(gate=gate, fail_at_step=1)
    raised = []

    def read():
        with pytest.raises(EngineStopped) as stopped:
            engine.next_outputs()
        raised.append(stopped.value)

    reading = threading.Thread(target=read)
    reading.start()
    engine.add("a", range(5), SamplingParams(9))
    gate.open(1)
    reading.join(PATIENCE_S)
    assert isinstance(raised[0].__cause__, RuntimeError)


def test_shutdown_ends_every_sequence_with_its_usage(start):
    gate = Gate()
    engine = start(gate=gate)
    engine.add("a", range(5), SamplingParams(50))
    gate.wait_for_step()
    engine.add("b", range(6), SamplingParams(50))
    stopping = threading.Thread(target=engine.shutdown)
    stopping.start()
    with engine._changed:
        assert engine._changed.wait_for(lambda: engine._is_stopping, PATIENCE_S)
    with pytest.raises(EngineStopped, match="shut down"):
        engine.add("c", range(5), SamplingParams(1))
    gate.open(1)
    stopping.join(PATIENCE_S)
    reader = Reader(engine)
    reader.read_until_finished("a", "b")
    assert reader.final("a").usage == Usage(5, 0, 1)
    assert reader.final("b").usage == Usage(6, 0, 0)
    with pytest.raises(EngineStopped, match="shut down"):
        engine.next_outputs()
    engine.shutdown()


def test_idle_engine_times_out_and_shuts_down(start):
    engine = start()
    assert engine.next_outputs(0) == []
    engine.shutdown()
    with pytest.raises(EngineStopped):
        engine.next_outputs()


def test_run_out_lasts_as_long_as_the_loop_and_says_why_it_ended(start):
    engine = start(fail_at_step=2)
    ended = []

    def run_out():
        try:
            engine.run_out()
        except EngineStopped as exc:
            ended.append(exc)

    thread = threading.Thread(target=run_out)
    thread.start()
    assert not ended
    engine.add("a", range(5), SamplingParams(9))
    thread.join(PATIENCE_S)
    (error,) = ended
    assert "fake failure at step 2" in str(error)
    assert isinstance(error.__cause__, RuntimeError)
