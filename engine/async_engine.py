"""The engine's step loop on a thread of its own, and the doors to it for all other threads.

Callers never wait for a step to add, and for the running one at most to abort.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import NoReturn

from engine.engine import Engine, EngineTotals
from engine.errors import DuplicateSequence, EngineStopped
from engine.outputs import SkipCounts, StepOutput, StepStats, Usage
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Runs `engine`, which nobody else may touch from now on, until `shutdown` or an error.

    All methods may be called from any thread; `next_outputs` has one reader. The loop stops
    stepping while the reader has left `max_pending_steps` outputs unread; aborts work even then.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_pending_steps: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._max_pending_steps = max_pending_steps
        self._clock = clock
        self._changed = threading.Condition()  # guards all that follows
        self._arrivals: deque[Sequence] = deque()
        self._aborts: deque[tuple[Sequence, Future[Usage | None]]] = deque()
        self._outbox: list[StepOutput] = []
        self._live: dict[str, Sequence] = {}  # added; neither aborted nor told to be finished
        self._progress_at_s = clock()
        self._is_stopping = False
        self._has_stopped = False
        self._cause: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> StepStats:
        return self._engine.stats

    @property
    def totals(self) -> EngineTotals:
        return self._engine.totals

    @property
    def skipped(self) -> SkipCounts:
        return self._engine.skipped

    @property
    def has_stopped(self) -> bool:
        return self._has_stopped

    @property
    def last_progress_s(self) -> float:
        """Seconds since the last step ended, or since work came to an idle engine; 0 when idle."""
        with self._changed:
            return self._clock() - self._progress_at_s if self._live else 0.0

    def add(
        self,
        seq_id: str,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        cache_salt: bytes = b"",
        priority: int = 0,
    ) -> None:
        """As `Engine.add`; never waits for a step. Raises EngineStopped as well."""
        sequence = self._engine.prepare(
            seq_id, prompt_token_ids, params, cache_salt=cache_salt, priority=priority
        )
        with self._changed:
            if self._is_stopping:
                raise self._stopped()
            if seq_id in self._live:
                raise DuplicateSequence(
                    f"sequence {seq_id} is already in the engine; choose a new id or abort it"
                )
            if not self._live:
                self._progress_at_s = self._clock()
            self._live[seq_id] = sequence
            self._arrivals.append(sequence)
            self._changed.notify_all()

    def abort(self, seq_id: str) -> Usage | None:
        """As `Engine.abort`, after at most the step that is running. Idempotent; None as well
        when the engine has stopped."""
        usage: Future[Usage | None] = Future()
        with self._changed:
            sequence = self._live.get(seq_id)
            if self._is_stopping or sequence is None:
                return None
            self._aborts.append((sequence, usage))
            self._changed.notify_all()
        return usage.result()

    def next_outputs(self, timeout_s: float | None = None) -> list[StepOutput]:
        """Every step output not read yet, in order; waits for the first, `[]` when none came in
        `timeout_s`. Raises EngineStopped, chained from the loop's error, once all are read."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._has_stopped, timeout_s)
            if self._has_stopped and not self._outbox:
                raise self._stopped()
            outputs, self._outbox = self._outbox, []
            self._changed.notify_all()
            return outputs

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Abort what is in flight (the outputs can still be read) and end the loop. Idempotent.
        Waits at most `timeout_s` for a step that hangs."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def spill_cached(self) -> Iterator[None]:
        """As `Engine.spill_cached`, after `shutdown`; nothing when the loop ended otherwise."""
        if self._has_stopped and self._cause is None:
            yield from self._engine.spill_cached()

    def run_out(self) -> NoReturn:
        """Waits until the loop has ended. Raises EngineStopped, chained from the loop's error."""
        self._thread.join()
        raise self._stopped()

    def _stopped(self) -> EngineStopped:
        stopped = EngineStopped(
            "the engine was shut down; start a new one"
            if self._cause is None
            else f"the engine stopped: {self._cause!r}; start a new one"
        )
        stopped.__cause__ = self._cause
        return stopped

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._wait_for_turn():
                self._take_commands()
                if self._can_step():
                    self._publish(self._engine.step())
            self._abort_all()
        except BaseException as exc:  # the thread ends here, and every caller learns why
            logger.exception("engine stopped")
            cause = exc
        self._stop(cause)

    def _wait_for_turn(self) -> bool:
        """Sleep until there is something to do; False when that is to stop."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_stopping or self._arrivals or self._aborts or self._can_step()
            )
            return not self._is_stopping

    def _can_step(self) -> bool:
        return self._engine.has_work and len(self._outbox) < self._max_pending_steps

    def _take_commands(self) -> None:
        while self._aborts:
            sequence, usage = self._aborts[0]  # stays queued, so that an error answers it too
            self._take_arrivals()  # it was added before, so it is in the engine from here on
            usage.set_result(self._abort(sequence))
            self._aborts.popleft()
        self._take_arrivals()

    def _take_arrivals(self) -> None:
        while self._arrivals:
            self._engine.add_prepared(self._arrivals.popleft())

    def _abort(self, sequence: Sequence) -> Usage | None:
        with self._changed:
            # It may have finished since, and its id may be another sequence's by now.
            if self._live.get(sequence.seq_id) is not sequence:
                return None
            del self._live[sequence.seq_id]
        return self._engine.abort(sequence.seq_id)

    def _publish(self, step_output: StepOutput) -> None:
        with self._changed:
            for output in step_output.outputs:
                # An aborted one left when it was aborted; its id may be in use again.
                if output.finish_reason not in (None, FinishReason.ABORT):
                    del self._live[output.seq_id]
            self._outbox.append(step_output)
            self._progress_at_s = self._clock()
            self._changed.notify_all()

    def _abort_all(self) -> None:
        self._take_commands()
        for sequence in tuple(self._live.values()):
            self._abort(sequence)
        if self._engine.has_work:
            self._publish(self._engine.step())

    def _stop(self, cause: BaseException | None) -> None:
        with self._changed:
            self._cause = cause
            self._is_stopping = self._has_stopped = True
            self._live.clear()
            self._arrivals.clear()
            for _, usage in self._aborts:
                usage.set_result(None)
            self._aborts.clear()
            self._changed.notify_all()
