"""Every sequence of the engine from arrival to last token: who waits, who runs, what comes next."""

from bisect import insort
from math import inf

from engine.cache.block_allocator import BlockAllocator
from engine.cache.block_hash import extend_chain, root_hash
from engine.cache.spill import Restores
from engine.cache.tiers import BlockSpill
from engine.config import SchedulerConfig
from engine.errors import (
    CacheTooSmall,
    DuplicateSequence,
    IntegrityError,
    InvalidSequence,
    PromptTooLong,
)
from engine.outputs import SampledTokens, SequenceOutput, TokenLogprobs
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.scheduling.budget import Candidate, PrefillBudget, TimeBudget, TokenBudget
from engine.scheduling.cost_model import CostModel, shape_of
from engine.scheduling.decode import age, plan_decodes
from engine.scheduling.prefill import find_admissible, find_prefilling, plan_prefills
from engine.sequence import FinishReason, Sequence, SequenceStatus


class Scheduler:
    """Owns the sequences and, through the allocator, their blocks. One thread at a time, except
    `prepare`, which touches nothing but its argument.

    `address` names the model and the format of its cache; it salts every block hash. With a cold
    tier behind `restores`, plans say what to spill and to restore. `costs` may know the device
    already; it is used with an `itl_budget_ms` only, and learns from `observe`.
    Raises CacheTooSmall when the pool could not finish a single longest sequence.
    """

    def __init__(
        self,
        scheduler_config: SchedulerConfig,
        allocator: BlockAllocator,
        max_model_len: int,
        address: bytes,
        restores: Restores | None = None,
        costs: CostModel | None = None,
    ) -> None:
        _check_capacity(allocator, max_model_len)
        _check_limits(scheduler_config)
        self.max_model_len = max_model_len
        self._config = scheduler_config
        self._allocator = allocator
        self._address = address
        self._has_cold_tier = restores is not None
        self._restores = restores or Restores()
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
        return self._allocator.num_free_blocks

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

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
        self._hash_full_blocks(sequence)

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
        cold tier, and nothing is pending, is it empty, and `await_restores` passes time.
        """
        self._restores.collect()
        decodes, preempted = plan_decodes(self._running, self._allocator)
        for victim in preempted:
            insort(self._waiting, victim, key=age)
        # Blocks taken from a victim are for those who run; nobody joins in the same step.
        arrivals = [] if preempted else self._find_arrivals()
        prefills = plan_prefills(
            find_prefilling(self._running) + arrivals,
            self._budget_beside(decodes),
            self._allocator,
            self._restores,
        )
        for candidate in arrivals:
            if candidate.sequence.status is SequenceStatus.RUNNING:
                self._waiting.remove(candidate.sequence)
                insort(self._running, candidate.sequence, key=age)
        for entry in (*decodes, *prefills):
            self._expect(entry)
        evicted = self._allocator.take_evicted()
        return ScheduledBatch(
            (*decodes, *prefills),
            tuple(sequence.seq_id for sequence in preempted),
            evicted if self._has_cold_tier else (),
            self._restores.take_placed(),
        )

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """The step of `batch` took `seconds` in all. Not needed without an `itl_budget_ms`."""
        self._now_s += seconds
        if batch and self._config.itl_budget_ms is not None:
            self._costs.observe(shape_of(batch.scheduled), seconds)

    def await_restores(self, timeout_s: float) -> None:
        """Sleep until a block that some sequence waits for is there, `timeout_s` at most. Only
        after an empty batch."""
        self._restores.wait(timeout_s)

    def cached_blocks(self) -> tuple[BlockSpill, ...]:
        """What the cold tier should have before the pool is gone; nothing without a tier."""
        return self._allocator.cached() if self._has_cold_tier else ()

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
            self._register_filled(entry)
            output = self._conclude(entry, tokens.get(entry.sequence.seq_id))
            if output is not None:
                outputs.append(output)
        return tuple(outputs)

    def _budget_beside(self, decodes: list[ScheduledSequence]) -> PrefillBudget:
        num_left = self._config.max_num_batched_tokens - len(decodes)
        if self._config.itl_budget_ms is None:
            return TokenBudget(num_left)
        seconds_left = inf
        if decodes:
            target_s = self._costs.target_for(self._config.itl_budget_ms / 1e3)
            seconds_left = target_s - self._costs.predict(shape_of(decodes))
        return TimeBudget(
            num_left, seconds_left, self._costs, self._allocator.block_size, self._now_s
        )

    def _find_arrivals(self) -> list[Candidate]:
        return find_admissible(
            self._waiting,
            self._running,
            self._allocator,
            self._config.max_num_sequences,
            self._restores,
        )

    def _expect(self, entry: ScheduledSequence) -> None:
        entry.sequence.num_computed_tokens = entry.end
        if entry.samples:
            entry.sequence.expect_token()

    def _register_filled(self, entry: ScheduledSequence) -> None:
        """Not those of a sequence that has lost its blocks meanwhile."""
        sequence, block_size = entry.sequence, self._allocator.block_size
        filled = range(entry.start // block_size, entry.end // block_size)
        if filled and sequence.block_table and self._allocator.enable_prefix_cache:
            self._hash_full_blocks(sequence)
            for index in filled:
                self._allocator.register(
                    sequence.block_table[index], sequence.block_hashes[index], sequence.cache_salt
                )

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
        self._allocator.free(sequence.block_table)
        self._restores.drop(sequence.seq_id)
        sequence.block_table = []
        sequence.drop_pending()
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def _hash_full_blocks(self, sequence: Sequence) -> None:
        if self._allocator.enable_prefix_cache:
            root = root_hash(self._address, sequence.cache_salt)
            extend_chain(
                sequence.block_hashes,
                root,
                sequence.token_ids,
                self._allocator.block_size,
                sequence.num_known_tokens,
            )

    def check_integrity(self) -> None:
        """Raises IntegrityError naming the sequence or block whose books disagree."""
        self._allocator.check_integrity(sequence.block_table for sequence in self._running)
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
            is_bare = not sequence.block_table and sequence.num_computed_tokens == 0
            _require(is_bare, f"{sequence.seq_id} waits and owns blocks")
        for sequence in self._running:
            self._check_running(sequence)
        self._restores.check_integrity({sequence.seq_id for sequence in self._waiting})

    def _check_running(self, sequence: Sequence) -> None:
        num_computed, num_tokens = sequence.num_computed_tokens, sequence.num_tokens
        _require(
            num_computed < num_tokens + sequence.is_planned_out,
            f"{sequence.seq_id} runs with {num_computed} of {num_tokens} tokens computed",
        )
        num_slots = len(sequence.block_table) * self._allocator.block_size
        _require(
            num_slots >= num_computed,
            f"{sequence.seq_id} has {num_computed} tokens computed in {num_slots} slots",
        )
        # The table may be longer than the chain (its last block is not full), and the chain longer
        # than the table (the rest of the prompt); where both are, they agree.
        for block_id, block_hash in zip(sequence.block_table, sequence.block_hashes, strict=False):
            _require(
                self._allocator.hash_of(block_id) in (None, block_hash),
                f"{sequence.seq_id} reads block {block_id}, which holds other tokens",
            )


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


def _check_capacity(allocator: BlockAllocator, max_model_len: int) -> None:
    num_slots = allocator.num_blocks * allocator.block_size
    if num_slots < max_model_len + allocator.block_size:
        raise CacheTooSmall(
            f"the KV pool holds {allocator.num_blocks} blocks of {allocator.block_size} = "
            f"{num_slots} tokens, but one sequence of max_model_len {max_model_len} and a spare "
            f"block need {max_model_len + allocator.block_size}; raise kv_cache_bytes or lower "
            "max_model_len"
        )


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
