"""The loop: arrivals, aborts, a step, and a look at what came of it."""

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.command import Progress
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.load import Load, Request, Requests
from benchmarks.soak.watch import MemoryWatch, Probe, StepTimes
from engine.engine import EngineTotals
from engine.errors import IntegrityError
from engine.outputs import StepOutput, StepStats, Usage
from engine.sampling_params import SamplingParams

WARM_UP_SHARE = 0.25
PROGRESS_S, LOOK_S = 10.0, 0.5
BURST_SHARE, MAX_BURST = 0.3, 12
NUM_LULLS = 6  # in the whole time: no arrivals until the engine is idle
MAX_STEPS_OF_A_REQUEST = 20_000  # that are left when nothing arrives any more


class SoakedEngine(Protocol):
    @property
    def has_work(self) -> bool: ...
    @property
    def stats(self) -> StepStats: ...
    @property
    def totals(self) -> EngineTotals: ...
    def add(
        self, seq_id: str, prompt: list[int], params: SamplingParams, *, cache_salt: bytes
    ) -> None: ...
    def abort(self, seq_id: str) -> Usage | None: ...
    def step(self) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    ledger: Ledger
    totals: EngineTotals
    times: StepTimes
    cpu_times: StepTimes  # of the calling thread, which a busy machine does not stretch
    memory: MemoryWatch
    num_steps: int
    seconds: float


class Soak:
    """Of one engine. `lag` as `StepTimes` has it. Prompts of `lengths` come first, one at a time,
    before the clock runs: what is kept for each number of tokens of a step is there then."""

    def __init__(
        self,
        engine: SoakedEngine,
        load: Load,
        probe: Probe,
        seconds: float,
        *,
        lag: int,
        lengths: Iterable[int] = (),
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        progress: Progress = lambda _: None,
    ) -> None:
        self._engine = engine
        self._load = load
        self._seconds = seconds
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._progress = progress
        self._lengths = lengths
        self._requests = Requests(load, seed)
        self._random = random.Random(seed + 1)
        self._ledger = Ledger()
        self._times = StepTimes(lag)
        self._cpu_times = StepTimes(0)
        self._memory = MemoryWatch(probe, WARM_UP_SHARE * seconds, seconds)
        self._started_s = clock()
        self._looked_s = self._told_s = 0.0
        self._num_steps = 0

    def run(self) -> Outcome:
        """Ends early where the engine raises: what it raised is a fault."""
        try:
            self._run()
        except IntegrityError as exc:
            self._ledger.fault("integrity", str(exc))
        except Exception as exc:
            self._progress(f"step {self._num_steps}: {exc!r}")
            self._ledger.fault("errors", repr(exc))
        return Outcome(
            self._ledger,
            self._engine.totals,
            self._times,
            self._cpu_times,
            self._memory,
            self._num_steps,
            self._now_s(),
        )

    def _run(self) -> None:
        for length in self._lengths:
            self._add(self._requests.of_length(length))
            while self._engine.has_work:
                output = self._engine.step()
                self._ledger.book(output.outputs)
                self._tell(output.stats)
        self._started_s, self._told_s = self._clock(), 0.0
        num_lulls = 0
        while (now_s := self._now_s()) < self._seconds:
            if now_s >= (num_lulls + 1) * self._seconds / (NUM_LULLS + 1):
                num_lulls += 1
                self._drain(self._seconds)
                if self._engine.has_work:  # the time is up, or requests never end
                    break
                self._ledger.idle(self._num_blocks_missing())
            self._arrive()
            self._abort_some()
            self._step()
        for seq_id in self._ledger.abortable:  # those before have shown that they end
            self._abort(seq_id)
        self._drain()
        self._ledger.close(self._engine.totals, self._num_blocks_missing())

    def _now_s(self) -> float:
        return self._clock() - self._started_s

    def _arrive(self) -> None:
        if self._engine.has_work and self._random.random() >= BURST_SHARE:
            return
        for _ in range(self._random.randint(1, MAX_BURST)):
            if self._ledger.num_live >= self._load.max_live:
                return
            request = self._requests.next()
            self._add(request)
            if self._random.random() < self._load.abort_share / 4:
                self._abort(request.seq_id)  # before it was ever planned

    def _add(self, request: Request) -> None:
        self._ledger.begin(request)
        self._engine.add(request.seq_id, request.prompt, request.params, cache_salt=request.salt)

    def _abort_some(self) -> None:
        """Steps that end a request are rare: abort in proportion to those that did."""
        live = self._ledger.abortable
        num_wanted = self._load.abort_share * self._ledger.num_begun
        if live and self._ledger.ended["abort"] < num_wanted and self._random.random() < 0.1:
            self._abort(self._random.choice(live))

    def _abort(self, seq_id: str) -> None:
        self._ledger.abort(seq_id, self._engine.abort(seq_id))
        if self._engine.abort(seq_id) is not None:
            self._ledger.fault("ends", f"{seq_id} was aborted twice")

    def _drain(self, until_s: float = math.inf) -> None:
        """Until the engine is idle, or the time has come."""
        num_steps = 0
        while self._engine.has_work and self._now_s() < until_s:
            self._step()
            num_steps += 1
            if num_steps > MAX_STEPS_OF_A_REQUEST:
                self._ledger.fault("ends", f"work is left after {num_steps} steps")
                return

    def _num_blocks_missing(self) -> int:
        return self._engine.stats.num_blocks - self._engine.stats.num_free_blocks

    def _step(self) -> None:
        started_s, cpu_started_s = self._clock(), self._cpu_clock()
        output = self._engine.step()
        step_ms = (self._clock() - started_s) * 1e3
        cpu_ms = (self._cpu_clock() - cpu_started_s) * 1e3
        self._num_steps += 1
        self._ledger.book(output.outputs)
        now_s = self._now_s()
        is_warm = now_s >= WARM_UP_SHARE * self._seconds
        self._times.note(output.stats, step_ms, counts=is_warm)
        self._cpu_times.note(output.stats, cpu_ms, counts=is_warm)
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._memory.look(now_s)
        self._tell(output.stats)

    def _tell(self, stats: StepStats) -> None:
        now_s = self._now_s()
        if now_s - self._told_s < PROGRESS_S:
            return
        self._told_s = now_s
        memory = ", ".join(f"{name} {num / 1e6:.1f} MB" for name, num in self._memory.last.items())
        self._progress(
            f"{self._num_steps} steps, {self._ledger.num_begun} requests, "
            f"{stats.num_running} running, {stats.num_waiting} waiting, "
            f"{self._engine.totals.preemptions} preemptions, {memory}, "
            f"faults: {dict(self._ledger.faults) or 'none'}"
        )
