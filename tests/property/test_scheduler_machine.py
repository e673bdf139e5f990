"""The scheduler under anything: whatever is added, aborted, preempted, spilled, restored, late,
lost or damaged, with one step planned ahead or none, the books agree, the limits hold, and every
sequence gets the tokens it would have got alone."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.block_allocator import BlockAllocator
from engine.cache.spill import Restores
from engine.config import SchedulerConfig
from engine.sampling_params import SamplingParams
from engine.scheduling.cost_model import shape_of
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceStatus
from tests.fakes.cold_tier import FakeColdTier
from tests.fakes.executor import FakeExecutor, expected_completion

VOCAB_SIZE = 7
BLOCK_SIZE = 4
MAX_MODEL_LEN = 24
SHARED = [3, 1, 4, 1, 5, 2, 6, 5, 3]
STEP_S = 0.1
MAX_WAIT_S = 0.5
STEP_TIMES_S = (0.0, 1e-6, 0.004, 0.005, 0.006, 0.1, 10.0)
MAX_NUM_IDLE_STEPS = 6  # awaiting one answer


class SchedulerMachine(RuleBasedStateMachine):
    max_model_len = MAX_MODEL_LEN

    @initialize(
        num_spare_blocks=st.integers(1, 3),
        max_num_sequences=st.sampled_from([1, 2, 3, 5]),
        num_spare_tokens=st.sampled_from([0, 1, 2, 4, 12]),
        enable_prefix_cache=st.sampled_from([True, True, False]),
        max_restores=st.sampled_from([1, 2, 64]),
        itl_budget_ms=st.sampled_from([None, None, None, 0.001, 5.0, 8.0]),
        delays=st.none() | st.lists(st.sampled_from([0, 0, 1, 3, 9, None]), max_size=12),
    )
    def start(
        self,
        num_spare_blocks,
        max_num_sequences,
        num_spare_tokens,
        enable_prefix_cache,
        max_restores,
        itl_budget_ms,
        delays,
    ):
        self.config = SchedulerConfig(
            max_num_sequences, max_num_sequences + num_spare_tokens, itl_budget_ms
        )
        self.allocator = BlockAllocator(
            MAX_MODEL_LEN // BLOCK_SIZE + num_spare_blocks, BLOCK_SIZE, enable_prefix_cache
        )
        self.now_s = 0.0
        self.tier = None if delays is None else FakeColdTier(delays)
        self.restores = Restores(
            self.tier,
            max_wait_s=MAX_WAIT_S,
            max_per_step=max_restores,
            clock=lambda: self.now_s,
        )
        self.max_restores = max_restores
        self.scheduler = Scheduler(
            self.config,
            PagedSpace(self.allocator, b"model", None if self.tier is None else self.restores),
            MAX_MODEL_LEN,
        )
        self.executor = FakeExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE, cold_tier=self.tier)
        self.sequences: list[Sequence] = []
        self.received: dict[str, list[int]] = {}
        self.in_flight = []

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

    @precondition(lambda self: self.sequences)
    @rule(draw=st.data(), max_tokens=st.sampled_from([1, 11]))
    def add_again(self, draw, max_tokens):
        """A prompt that starts as an earlier sequence went on: what prefix caches are for."""
        earlier = draw.draw(st.sampled_from(self.sequences))
        num_tokens = min(earlier.num_known_tokens, self.max_model_len - max_tokens)
        token_ids = earlier.token_ids[:num_tokens]
        sequence = Sequence(
            f"s{len(self.sequences)}",
            list(token_ids),
            len(token_ids),
            SamplingParams(max_tokens),
            cache_salt=earlier.cache_salt,
        )
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        self.received[sequence.seq_id] = []

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def execute(self):
        planned_out = {s.seq_id for s in self.sequences if s.is_planned_out}
        had_running = self.scheduler.num_running > 0
        running = [s for s in self.sequences if s.status is SequenceStatus.RUNNING]
        decoding = {s.seq_id for s in running if s.is_decoding}
        was_in_flight = bool(self.in_flight)
        batch = self.scheduler.schedule()
        assert not had_running or len(batch.restores) <= self.max_restores
        self.now_s += STEP_S
        is_idle = self.restores.num_awaited > 0 and self.scheduler.num_running == 0
        assert bool(batch) or was_in_flight or is_idle == self.scheduler.has_work
        self.check_batch(batch, planned_out)
        self.check_time(batch, decoding)
        if batch:
            self.in_flight.append((batch, self.executor.execute(batch)))

    @precondition(lambda self: self.in_flight)
    @rule(step_s=st.sampled_from(STEP_TIMES_S))
    def postprocess(self, step_s=0.005):
        batch, sampled = self.in_flight.pop(0)
        self.scheduler.observe(batch, step_s)
        for output in self.scheduler.postprocess(batch, sampled):
            self.received[output.seq_id] += output.token_ids
            sequence = next(s for s in self.sequences if s.seq_id == output.seq_id)
            assert output.finish_reason is sequence.finish_reason
            assert output.usage.completion_tokens == len(self.received[output.seq_id])

    @rule(num_steps=st.integers(1, 6), num_ahead=st.sampled_from([0, 1]))
    def step(self, num_steps, num_ahead):
        for _ in range(num_steps):
            if len(self.in_flight) < 2:
                self.execute()
            while len(self.in_flight) > num_ahead:
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

    @precondition(lambda self: self.tier is not None)
    @rule(index=st.integers(0, 7))
    def lose_a_block(self, index):
        self.tier.forget(index)

    @precondition(lambda self: self.tier is not None)
    @rule()
    def damage_every_block(self):
        for index in range(len(self.tier.stored)):
            self.tier.damage(index)

    @precondition(lambda self: self.tier is not None)
    @rule(is_full=st.booleans())
    def fill_or_empty_the_tier(self, is_full):
        self.tier.is_full = is_full

    @invariant()
    def books_agree(self):
        self.scheduler.check_integrity()

    def check_batch(self, batch, planned_out):
        assert batch.num_batched_tokens <= self.config.max_num_batched_tokens
        assert self.scheduler.num_running <= self.config.max_num_sequences
        scheduled = [entry.sequence.seq_id for entry in batch.scheduled]
        assert len(scheduled) == len(set(scheduled))
        assert not set(scheduled) & set(batch.preempted)
        assert all(entry.num_new_tokens > 0 for entry in batch.scheduled)
        assert batch or not (batch.spills or batch.restores)
        assert self.tier is not None or not (batch.spills or batch.restores)
        self.check_restores(batch)
        running = [s for s in self.sequences if s.status is SequenceStatus.RUNNING]
        if running:
            oldest = min(running, key=lambda s: (s.priority, s.arrival_index))
            is_served = oldest.seq_id in {*scheduled, *planned_out}
            assert is_served or self.may_wait_for_room(), "the oldest sequence stands still"

    def may_wait_for_room(self):
        return False

    def check_time(self, batch, decoding):
        """Beside decodes, prefills stay in their time; or there is one of them, of one block."""
        decodes = [entry for entry in batch.scheduled if entry.sequence.seq_id in decoding]
        prefills = [entry for entry in batch.scheduled if entry.sequence.seq_id not in decoding]
        if self.config.itl_budget_ms is None or not (decodes and prefills):
            return
        costs = self.scheduler._costs
        seconds = costs.predict(shape_of(decodes)) + sum(
            costs.predict_chunk(entry.num_new_tokens, entry.start) for entry in prefills
        )
        is_a_block = len(prefills) == 1 and prefills[0].num_new_tokens <= BLOCK_SIZE
        assert is_a_block or seconds <= self.config.itl_budget_ms / 1e3 * (1 + 1e-9)

    def check_restores(self, batch):
        """Every restored block is read by a sequence of this step that owns its content, or can be
        found in the prefix cache."""
        owned = {
            (block_id, block_hash)
            for entry in batch.scheduled
            for block_id, block_hash in zip(
                entry.sequence.block_table, entry.sequence.block_hashes, strict=False
            )
        }
        restored = [(restore.block_id, restore.block_hash) for restore in batch.restores]
        assert len(restored) == len({block_id for block_id, _ in restored})
        for block_id, block_hash in set(restored) - owned:
            assert self.allocator.match_prefix([block_hash]) == [block_id]

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

    def check_all_is_given_back(self):
        assert self.allocator.num_referenced_blocks == 0

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.in_flight:
            self.postprocess()
        # The oldest advances a token a step at least, and a preempted one starts over only when
        # an older one lives: a bound on the steps that no live- or deadlock can keep, each at most
        # that often idle before it.
        for _ in range(1 + MAX_NUM_IDLE_STEPS * self.max_model_len * len(self.sequences)):
            if not self.scheduler.has_work:
                break
            self.step(1, 0)
        assert not self.scheduler.has_work
        self.check_all_is_given_back()
        assert self.restores.num_awaited == 0
        if self.tier is not None:
            assert self.tier.requests == {}
        for sequence in self.sequences:
            self.check_outcome(sequence)


SchedulerMachine.TestCase.settings = settings(
    max_examples=2_000, stateful_step_count=25, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase
