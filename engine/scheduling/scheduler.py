"""Every sequence of the engine from arrival to last token: who waits, who runs, what comes next."""

from bisect import insort
from math import inf

from engine.cache.tiers import BlockSpill
from engine.config import SchedulerConfig
from engine.errors import DuplicateSequence, IntegrityError, InvalidSequence, PromptTooLong
from engine.outputs import SampledTokens, SequenceOutput, TokenLogprobs
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.scheduling.budget import PrefillBudget, TimeBudget, TokenBudget
from engine.scheduling.cost_model import CostModel, shape_of
from engine.scheduling.decode import age
from engine.scheduling.kv_space import KvSpace
from engine.sequence import FinishReason, Sequence, SequenceStatus


class Scheduler:
    """Owns the sequences and, through `space`, where their KV lies. One thread at a time, except
    `prepare`, which touches nothing but its argument.

    `costs` may know the device already; it is used with an `itl_budget_ms` only, and learns from
    `observe`. Raises CacheTooSmall when a single longest sequence could not end.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        space: KvSpace,
        max_model_len: int,
        costs: CostModel | None = None,
    ) -> None:
        space.require_capacity(max_model_len)
        _check_limits(scheduler_config)
        self.max_model_len = max_model_len
        self._config = scheduler_config
        self._space = space
        self._costs = costs or CostModel()
        self._now_s = 0.0  # the steps so far, end to end
        self._waiting: list[Sequence] = []  # both sorted by age
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._num_arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def awaits_history(self) -> bool:
        """Pending tokens must be booked before the next step is planned."""
        return any(sequence.awaits_history for sequence in self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._space.num_free_blocks

    @property
    def num_blocks(self) -> int:
        return self._space.num_blocks

    def prepare(self, sequence: Sequence) -> None:
        """Refuse what can never run and hash the prompt's blocks: what can be done on the
        caller's own thread. Idempotent. Raises InvalidSequence and PromptTooLong."""
        num_prompt_tokens, max_tokens = sequence.num_prompt_tokens, sequence.params.max_tokens
        if num_prompt_tokens == 0:
            raise InvalidSequence(
                f"sequence {sequence.seq_id} has an empty prompt; send at least one token"
            )
        if num_prompt_tokens + max_tokens > self.max_model_len:
            raise PromptTooLong(
                f"prompt of {num_prompt_tokens} tokens + max_tokens {max_tokens} = "
                f"{num_prompt_tokens + max_tokens} tokens do not fit the context of "
                f"{self.max_model_len}; shorten the prompt or lower max_tokens"
            )
        self._space.prepare(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises DuplicateSequence, and what `prepare` raises."""
        self.prepare(sequence)
        if sequence.seq_id in self._sequences:
            raise DuplicateSequence(
                f"sequence {sequence.seq_id} is already in the engine; choose a new id or abort it"
            )
        sequence.arrival_index = self._num_arrivals
        sequence.arrival_s = self._now_s
        self._num_arrivals += 1
        self._sequences[sequence.seq_id] = sequence
        insort(self._waiting, sequence, key=age)

    def abort(self, seq_id: str) -> Sequence | None:
        """End the sequence in any state and free its blocks at once; None if it is not here.

        Safe while a batch with it is being executed: `postprocess` drops its token, and its
        blocks cannot be given away before the next `schedule`.
        """
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            self._finish(sequence, FinishReason.ABORT)
        return sequence

    def schedule(self) -> ScheduledBatch:
        """Plan the next step: every decode, then prefills within what is left of the budget.

        The plan counts as done: the next may be made before `postprocess` has its tokens, which
        are pending until then. While there is work the batch is not empty, and the oldest running
        sequence is in it unless it awaits its last token; only when all that could run await the
        cold tier, and nothing is pending, is it empty, and `await_progress` passes time.
        """
        self._space.begin()
        decodes, preempted = self._space.plan_decodes(self._running)
        for victim in preempted:
            insort(self._waiting, victim, key=age)
        # Room taken from a victim is for those who run; nobody joins in the same step.
        max_num_sequences = self._config.max_num_sequences
        arrivals = (
            []
            if preempted
            else self._space.find_admissible(self._waiting, self._running, max_num_sequences)
        )
        prefills = self._space.plan_prefills(
            self._space.find_prefilling(self._running) + arrivals, self._budget_beside(decodes)
        )
        for candidate in arrivals:
            if candidate.sequence.status is SequenceStatus.RUNNING:
                self._waiting.remove(candidate.sequence)
                insort(self._running, candidate.sequence, key=age)
        for entry in (*decodes, *prefills):
            self._expect(entry)
        return self._space.plan(
            (*decodes, *prefills), tuple(sequence.seq_id for sequence in preempted)
        )

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """The step of `batch` took `seconds` in all. Not needed without an `itl_budget_ms`."""
        self._now_s += seconds
        if batch and self._config.itl_budget_ms is not None:
            self._costs.observe(shape_of(batch.scheduled), seconds)

    def await_progress(self, timeout_s: float) -> None:
        """Sleep until something is there that a sequence waits for, `timeout_s` at most. Only after
        an empty batch."""
        self._space.await_progress(timeout_s)

    def cached_blocks(self) -> tuple[BlockSpill, ...]:
        """What the cold tier should have before the pool is gone; nothing without a tier."""
        return self._space.cached_blocks()

    def postprocess(
        self, batch: ScheduledBatch, sampled: SampledTokens
    ) -> tuple[SequenceOutput, ...]:
        """Book what the executor computed, batches in the order of their plans. `sampled` is in the
        order of `batch.sampling`; the token of a sequence that ended meanwhile is dropped."""
        sampling = [entry.sequence.seq_id for entry in batch.sampling]
        tokens = dict(
            zip(sampling, zip(sampled.token_ids, sampled.logprobs, strict=True), strict=True)
        )
        outputs = []
        for entry in batch.scheduled:
            if entry.sequence.status is SequenceStatus.FINISHED:
                continue
            self._space.register_filled(entry)
            output = self._conclude(entry, tokens.get(entry.sequence.seq_id))
            if output is not None:
                outputs.append(output)
        self._space.finish(batch)
        return tuple(outputs)

    def _budget_beside(self, decodes: list[ScheduledSequence]) -> PrefillBudget:
        num_left = self._config.max_num_batched_tokens - len(decodes)
        if self._config.itl_budget_ms is None:
            return TokenBudget(num_left)
        seconds_left = inf
        if decodes:
            target_s = self._costs.target_for(self._config.itl_budget_ms / 1e3)
            seconds_left = target_s - self._costs.predict(shape_of(decodes))
        return TimeBudget(num_left, seconds_left, self._costs, self._space.block_size, self._now_s)

    def _expect(self, entry: ScheduledSequence) -> None:
        entry.sequence.num_computed_tokens = entry.end
        if entry.samples:
            entry.sequence.expect_token()

    def _conclude(
        self, entry: ScheduledSequence, sampled: tuple[int, TokenLogprobs | None] | None
    ) -> SequenceOutput | None:
        """Book the sampled token, finish the sequence if that was its last; None if nothing of
        that happened."""
        sequence = entry.sequence
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampled is not None:
            token_id, logprob = sampled
            sequence.book_token(token_id)
            if sequence.grammar_state is not None:
                sequence.grammar_state.accept(token_id)
            token_ids, logprobs = (token_id,), (logprob,) if logprob is not None else ()
        reason = _finish_reason(entry)
        if reason is not None:
            self._finish(sequence, reason)
        elif sampled is None:
            return None
        return SequenceOutput(sequence.seq_id, token_ids, logprobs, reason, sequence.usage)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        is_running = sequence.status is SequenceStatus.RUNNING
        (self._running if is_running else self._waiting).remove(sequence)
        del self._sequences[sequence.seq_id]
        self._space.release(sequence)
        sequence.drop_pending()
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def check_integrity(self) -> None:
        """Raises IntegrityError naming the sequence or block whose books disagree."""
        queued = {sequence.seq_id: sequence for sequence in (*self._waiting, *self._running)}
        _require(queued == self._sequences, "the queues and the index hold different sequences")
        _require(
            self.num_running <= self._config.max_num_sequences,
            f"{self.num_running} sequences run, max_num_sequences is "
            f"{self._config.max_num_sequences}",
        )
        for queue, status in (
            (self._waiting, SequenceStatus.WAITING),
            (self._running, SequenceStatus.RUNNING),
        ):
            _require(queue == sorted(queue, key=age), f"{status.value} is not sorted by age")
            for sequence in queue:
                _require(sequence.status is status, f"{sequence.seq_id} is not {status.value}")
        for sequence in self._waiting:
            _require(sequence.num_computed_tokens == 0, f"{sequence.seq_id} waits, and is computed")
        for sequence in self._running:
            num_computed, num_tokens = sequence.num_computed_tokens, sequence.num_tokens
            _require(
                num_computed < num_tokens + sequence.is_planned_out,
                f"{sequence.seq_id} runs with {num_computed} of {num_tokens} tokens computed",
            )
        self._space.check_integrity(self._waiting, self._running)


def _finish_reason(entry: ScheduledSequence) -> FinishReason | None:
    """The context length needs no look: prompt + max_tokens was held against it at the door."""
    sequence, params = entry.sequence, entry.sequence.params
    num_sampled = sequence.usage.completion_tokens
    newest_token_id = sequence.token_ids[sequence.num_known_tokens - 1]
    if num_sampled and newest_token_id in params.stop_token_ids:
        is_cut = sequence.grammar_state is not None and sequence.grammar_state.has_failed
        return FinishReason.LENGTH if is_cut else FinishReason.STOP_TOKEN
    is_warm_up_done = params.max_tokens == 0 and entry.end == sequence.num_prompt_tokens
    if is_warm_up_done or 0 < params.max_tokens == num_sampled:
        return FinishReason.LENGTH
    return None


def _check_limits(config: SchedulerConfig) -> None:
    """With a token for every running sequence, a full house of decodes cannot shut out an older
    prefill."""
    if config.itl_budget_ms is not None and not config.itl_budget_ms > 0:
        raise ValueError(
            f"itl_budget_ms must be greater than 0, got {config.itl_budget_ms}; None is no budget"
        )
    if not 1 <= config.max_num_sequences <= config.max_num_batched_tokens:
        raise ValueError(
            "max_num_sequences must be at least 1 and at most max_num_batched_tokens, got "
            f"{config.max_num_sequences} and {config.max_num_batched_tokens}; change either"
        )


def _require(holds: bool, contradiction: str) -> None:
    if not holds:
        raise IntegrityError(contradiction)
