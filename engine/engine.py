"""The engine on one thread. A step is one sentence: schedule, execute, postprocess."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from engine.errors import InvalidGrammar, InvalidSamplingParams, InvalidSequence
from engine.grammar import Grammar, GrammarCompiler, GrammarState
from engine.outputs import (
    PendingTokens,
    SampledTokens,
    SequenceOutput,
    SkipCounts,
    StepOutput,
    StepStats,
    Usage,
)
from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence

SPILL_GROUP = 16  # blocks, of an 8B model in bf16 128 MiB
MAX_IDLE_WAIT_S = 0.005  # of a step with nothing to compute; what an arrival may have to wait


class Executor(Protocol):
    """Computes a plan: writes the KV of every scheduled token, samples where the plan says so.
    Before, it hands the blocks of `batch.spills` to the cold tier, then writes `batch.restores`."""

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        """Return one token for each of `batch.sampling`, in that order. A batch without sequences
        has spills, and nothing is computed."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    batch: ScheduledBatch
    tokens: PendingTokens
    started_s: float


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Sums over the final outputs reported so far, so that accounting can be held against them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finished_sequences: int = 0
    preemptions: int = 0
    spilled_blocks: int = 0  # handed to the cold tier, which may have dropped them
    restored_blocks: int = 0

    def plus_final(self, usage: Usage) -> "EngineTotals":
        return replace(
            self,
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            cached_tokens=self.cached_tokens + usage.cached_tokens,
            completion_tokens=self.completion_tokens + usage.completion_tokens,
            finished_sequences=self.finished_sequences + 1,
        )


class Engine:
    """Token ids in, token ids out. Every sequence that was added ends with exactly one output that
    has a finish reason, its usage final.

    One thread at a time, except `prepare`, `stats`, `totals` and `skipped`, which any thread may
    call.
    An executor's error leaves `step` as it came; the engine must not be stepped after it.
    `launch`, of an executor that has one, is `execute` without the wait for its tokens; `skipped`
    what it has left out, from any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        vocab_size: int,
        launch: Callable[[ScheduledBatch], PendingTokens] | None = None,
        grammars: GrammarCompiler | None = None,
        check_integrity: bool = False,
        skipped: Callable[[], SkipCounts] = SkipCounts,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._check_integrity = check_integrity
        self._skipped = skipped
        self._clock = clock
        self._launch = launch or self._execute
        self._num_left_in_flight = 0 if launch is None else 1
        self._in_flight: deque[StepInFlight] = deque()
        self._booked_s = -inf  # when a step was booked last
        self._step_s = 0.0  # how long that took
        self._aborted: list[SequenceOutput] = []  # not reported yet
        self._totals = EngineTotals()
        self._stats = self._measure(0, 0, 0, 0.0)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._aborted) or bool(self._in_flight)

    @property
    def stats(self) -> StepStats:
        """Of the last step; of an empty one before the first."""
        return self._stats

    @property
    def totals(self) -> EngineTotals:
        return self._totals

    @property
    def skipped(self) -> SkipCounts:
        """By decodes over tiers, up to a step or two ago; zeros where nothing may be."""
        return self._skipped()

    def prepare(
        self,
        seq_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        cache_salt: bytes = b"",
        priority: int = 0,
    ) -> Sequence:
        """A sequence that `add_prepared` will take. Compiles its grammar. Raises InvalidSequence,
        PromptTooLong, InvalidGrammar."""
        token_ids = list(prompt_token_ids)
        sequence = Sequence(
            seq_id, token_ids, len(token_ids), params, cache_salt=cache_salt, priority=priority
        )
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise InvalidSequence(
                f"token ids of sequence {seq_id} must be in [0, {self._vocab_size}), got "
                f"{min(token_ids)} to {max(token_ids)}; use the tokenizer of this model"
            )
        self._refuse_foreign_bias(params)
        self._scheduler.prepare(sequence)
        if params.grammar is not None:
            sequence.grammar_state = self._compile(params.grammar)
        return sequence

    def add(
        self,
        seq_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        cache_salt: bytes = b"",
        priority: int = 0,
    ) -> None:
        """Queue a sequence. `cache_salt` separates tenants in the prefix cache; a smaller
        `priority` runs first. Raises what `prepare` raises, and DuplicateSequence."""
        self.add_prepared(
            self.prepare(seq_id, prompt_token_ids, params, cache_salt=cache_salt, priority=priority)
        )

    def add_prepared(self, sequence: Sequence) -> None:
        """Raises DuplicateSequence."""
        self._scheduler.add(sequence)

    def abort(self, seq_id: str) -> Usage | None:
        """End a sequence at once and return its final usage; None if it is not here (any more).
        Its last output comes with the next step."""
        sequence = self._scheduler.abort(seq_id)
        if sequence is None:
            return None
        self._aborted.append(SequenceOutput(seq_id, (), (), FinishReason.ABORT, sequence.usage))
        return sequence.usage

    def step(self) -> StepOutput:
        """Schedule, launch, postprocess. With a `launch` the newest step stays in flight, and what
        is booked is the one before it: its outputs come a call later."""
        started_s = self._clock()
        outputs = self._take_aborted()
        if self._scheduler.awaits_history:
            outputs += self._book_all_but(0)
        batch = self._scheduler.schedule()
        if batch:
            self._in_flight.append(StepInFlight(batch, self._launch(batch), started_s))
        elif not self._in_flight:
            self._await_progress(batch, started_s)
        outputs += self._book_all_but(self._num_left_in_flight if batch else 0)
        if self._check_integrity:
            self._scheduler.check_integrity()
        self._count(outputs, batch)
        self._stats = self._measure(
            batch.num_batched_tokens - batch.num_decode_tokens,
            batch.num_decode_tokens,
            len(batch.preempted),
            self._step_s * 1e3,
        )
        return StepOutput(tuple(outputs), self._stats)

    def spill_cached(self) -> Iterator[None]:
        """Hand the cached blocks to the cold tier, if there is one, a group at a time: when the
        pool is about to go. Nothing may be in flight."""
        blocks = self._scheduler.cached_blocks()
        for start in range(0, len(blocks), SPILL_GROUP):
            self._executor.execute(ScheduledBatch((), spills=blocks[start : start + SPILL_GROUP]))
            yield

    def _compile(self, grammar: Grammar) -> GrammarState:
        if self._grammars is None:
            raise InvalidGrammar(
                f"this engine was built without a compiler of grammars, got a {grammar.kind}; "
                "drop it, or build the engine with one"
            )
        return self._grammars.compile(grammar)

    def _refuse_foreign_bias(self, params: SamplingParams) -> None:
        for token_id, _ in params.logit_bias:
            if not 0 <= token_id < self._vocab_size:
                raise InvalidSamplingParams(
                    f"logit_bias must name token ids in [0, {self._vocab_size}), got {token_id}; "
                    "use the tokenizer of this model"
                )

    def _execute(self, batch: ScheduledBatch) -> PendingTokens:
        sampled = self._executor.execute(batch)
        return lambda: sampled

    def _await_progress(self, batch: ScheduledBatch, started_s: float) -> None:
        self._scheduler.await_progress(MAX_IDLE_WAIT_S)
        self._step_s = self._clock() - started_s
        self._scheduler.observe(batch, self._step_s)

    def _book_all_but(self, num_left: int) -> list[SequenceOutput]:
        """Of the steps in flight the oldest first, each waited for."""
        outputs: list[SequenceOutput] = []
        while len(self._in_flight) > num_left:
            step = self._in_flight.popleft()
            outputs += self._scheduler.postprocess(step.batch, step.tokens())
            now_s = self._clock()
            # A step that was launched behind another began when that one ended.
            self._step_s = now_s - max(step.started_s, self._booked_s)
            self._booked_s = now_s
            self._scheduler.observe(step.batch, self._step_s)
        return outputs

    def _take_aborted(self) -> list[SequenceOutput]:
        aborted, self._aborted = self._aborted, []
        return aborted

    def _count(self, outputs: list[SequenceOutput], batch: ScheduledBatch) -> None:
        totals = replace(
            self._totals,
            preemptions=self._totals.preemptions + len(batch.preempted),
            spilled_blocks=self._totals.spilled_blocks + len(batch.spills),
            restored_blocks=self._totals.restored_blocks + len(batch.restores),
        )
        for output in outputs:
            if output.finish_reason is not None:
                totals = totals.plus_final(output.usage)
        self._totals = totals

    def _measure(
        self, num_prefill_tokens: int, num_decode_tokens: int, num_preempted: int, step_ms: float
    ) -> StepStats:
        return StepStats(
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_preempted=num_preempted,
            num_free_blocks=self._scheduler.num_free_blocks,
            num_blocks=self._scheduler.num_blocks,
            step_ms=step_ms,
        )
