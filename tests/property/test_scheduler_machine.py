"""The scheduler under anything: whatever is added, aborted and preempted, the books agree, the
limits hold, and every sequence gets the tokens it would have got alone."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceStatus
from tests.fakes.executor import FakeExecutor, expected_completion

VOCAB_SIZE = 7
BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
SHARED = [3, 1, 4, 1, 5, 2, 6, 5, 3]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_spare_blocks=st.integers(1, 3),
        max_num_sequences=st.sampled_from([1, 2, 3, 5]),
        num_spare_tokens=st.sampled_from([0, 1, 2, 4, 12]),
        enable_prefix_cache=st.booleans(),
    )
    def start(self, num_spare_blocks, max_num_sequences, num_spare_tokens, enable_prefix_cache):
        self.config = SchedulerConfig(max_num_sequences, max_num_sequences + num_spare_tokens)
        self.allocator = BlockAllocator(
            MAX_MODEL_LEN // BLOCK_SIZE + num_spare_blocks, BLOCK_SIZE, enable_prefix_cache
        )
        self.scheduler = Scheduler(self.config, self.allocator, MAX_MODEL_LEN, b"model")
        self.executor = FakeExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self.sequences: list[Sequence] = []
        self.received: dict[str, list[int]] = {}
        self.in_flight = None

    @rule(
        num_shared=st.integers(0, len(SHARED)),
        tail=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4),
        max_tokens=st.sampled_from([0, 1, 4, 11]),
        stop_token_ids=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
        cache_salt=st.sampled_from([b"ours", b"theirs"]),
        priority=st.sampled_from([0, 0, 1]),
    )
    def add(self, num_shared, tail, max_tokens, stop_token_ids, cache_salt, priority):
        prompt = SHARED[:num_shared] + tail
        sequence = Sequence(
            f"s{len(self.sequences)}",
            list(prompt),
            len(prompt),
            SamplingParams(max_tokens, stop_token_ids=stop_token_ids),
            cache_salt=cache_salt,
            priority=priority,
        )
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        self.received[sequence.seq_id] = []

    @rule(
        num_prompt_tokens=st.lists(st.integers(1, 10), min_size=3, max_size=4),
        first_token=st.integers(0, VOCAB_SIZE - 1),
        priority=st.sampled_from([0, 1]),
    )
    def add_crowd(self, num_prompt_tokens, first_token, priority):
        """Short prompts with long completions: what admission cannot foresee."""
        for num_tokens in num_prompt_tokens:
            tail = [first_token] * num_tokens
            self.add(0, tail, 14, frozenset(), b"ours", priority)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def execute(self):
        batch = self.scheduler.schedule()
        assert bool(batch) == self.scheduler.has_work
        self.check_batch(batch)
        if batch:
            self.in_flight = batch, self.executor.execute(batch)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def postprocess(self):
        batch, sampled = self.in_flight
        self.in_flight = None
        for output in self.scheduler.postprocess(batch, sampled):
            self.received[output.seq_id] += output.token_ids
            sequence = next(s for s in self.sequences if s.seq_id == output.seq_id)
            assert output.finish_reason is sequence.finish_reason
            assert output.usage.completion_tokens == len(self.received[output.seq_id])

    @precondition(lambda self: self.in_flight is None)
    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.execute()
            if self.in_flight is not None:
                self.postprocess()
            self.books_agree()

    @precondition(lambda self: self.sequences)
    @rule(draw=st.data())
    def abort(self, draw):
        sequence = draw.draw(st.sampled_from(self.sequences))
        was_finished = sequence.status is SequenceStatus.FINISHED
        aborted = self.scheduler.abort(sequence.seq_id)
        assert aborted is (None if was_finished else sequence)
        assert sequence.block_table == []

    @invariant()
    def books_agree(self):
        self.scheduler.check_integrity()

    def check_batch(self, batch):
        assert batch.num_batched_tokens <= self.config.max_num_batched_tokens
        assert self.scheduler.num_running <= self.config.max_num_sequences
        scheduled = [entry.sequence.seq_id for entry in batch.scheduled]
        assert len(scheduled) == len(set(scheduled))
        assert not set(scheduled) & set(batch.preempted)
        assert all(entry.num_new_tokens > 0 for entry in batch.scheduled)
        running = [s for s in self.sequences if s.status is SequenceStatus.RUNNING]
        if running:
            oldest = min(running, key=lambda s: (s.priority, s.arrival_index))
            assert oldest.seq_id in scheduled, "the oldest sequence stands still"

    def check_outcome(self, sequence):
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        received = self.received[sequence.seq_id]
        assert received == expected_completion(prompt, len(received), VOCAB_SIZE)
        stops = [index for index, t in enumerate(received) if t in sequence.params.stop_token_ids]
        if sequence.finish_reason is FinishReason.STOP_TOKEN:
            assert stops == [len(received) - 1]
        else:
            assert stops == []
        if sequence.finish_reason is FinishReason.LENGTH:
            assert len(received) == sequence.params.max_tokens
        assert sequence.num_cached_tokens < sequence.num_prompt_tokens

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight is not None:
            self.postprocess()
        # The oldest advances a token a step at least, and a preempted one starts over only when
        # an older one lives: a bound on the steps that no live- or deadlock can keep.
        for _ in range(1 + sum(MAX_MODEL_LEN for _ in self.sequences)):
            if not self.scheduler.has_work:
                break
            self.step(1)
        assert not self.scheduler.has_work
        assert self.allocator.num_referenced_blocks == 0
        for sequence in self.sequences:
            self.check_outcome(sequence)


SchedulerMachine.TestCase.settings = settings(
    max_examples=2_000, stateful_step_count=25, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
