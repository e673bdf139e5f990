"""Streams that decode, one fresh long prompt, and a short prompt every half second meanwhile."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from benchmarks.engine.cases import Bench, Samples
from benchmarks.engine.stepped import SteppedEngine, next_request_id
from benchmarks.errors import MeasurementFailed
from benchmarks.percentiles import percentile

ITL_P99, SHORT_TTFT_P95, LONG_TTFT = (
    "itl_p99_during_128k",
    "short_ttft_p95_during_128k",
    "long_ttft_128k",
)
QUIET_ITL_P50 = "itl_p50_quiet"
NUM_ANSWER_TOKENS = 2  # of the long prompt and of the short ones


@dataclass(frozen=True, slots=True)
class InterferenceCase:
    """Milliseconds. Gaps of the streams count from the long prompt's arrival to its first token;
    a short prompt's wait counts from when it was due, not from when a busy engine took it."""

    kind: ClassVar[str] = "interference"
    name: str = "interference"
    num_streams: int = 16
    stream_context: int = 1024
    long_context: int = 131072
    short_context: int = 200
    short_every_s: float = 0.5
    quiet_s: float = 2.0
    num_stream_tokens: int = 6000
    max_s: float = 60.0

    def samples(self, bench: Bench) -> Iterator[Samples]:
        for _ in bench.rounds():
            load = _Load(bench.engine)
            try:
                measured = self._once(bench, load)
            except MeasurementFailed:  # nothing else: a broken engine must not be stepped again
                load.end()
                raise
            load.end()
            yield measured

    def _once(self, bench: Bench, load: "_Load") -> Samples:
        # Made before the clock runs: a long one takes longer than a step.
        long_prompt = bench.fresh(self.long_context)
        num_shorts = int(self.max_s / self.short_every_s)
        shorts = [bench.fresh(self.short_context) for _ in range(num_shorts)]
        for _ in range(self.num_streams):
            load.add_stream(bench.fresh(self.stream_context), self.num_stream_tokens)
        self._decode_quietly(load)
        quiet_s = load.take_gaps()
        started_s = time.perf_counter()
        long_id = load.add(long_prompt, started_s)
        due_s = started_s
        waits: list[str] = []
        while long_id in load.due_s:
            now_s = time.perf_counter()
            if now_s - started_s > self.max_s:
                raise MeasurementFailed(f"no first token of the long prompt in {self.max_s:g} s")
            while due_s <= now_s and shorts:
                waits.append(load.add(shorts.pop(), due_s))
                due_s += self.short_every_s
            load.step()
        gaps_s = load.take_gaps()
        while load.due_s:
            load.step()
        return {
            ITL_P99: 1e3 * percentile(gaps_s, 99),
            SHORT_TTFT_P95: 1e3 * percentile([load.waited_s[each] for each in waits], 95),
            LONG_TTFT: 1e3 * load.waited_s[long_id],
            QUIET_ITL_P50: 1e3 * percentile(quiet_s, 50),
        }

    def _decode_quietly(self, load: "_Load") -> None:
        """Until all streams have decoded for `quiet_s`; keeps the gaps of that time alone."""
        while len(load.last_s) < self.num_streams:
            load.step()
        load.take_gaps()
        until_s = time.perf_counter() + self.quiet_s
        while time.perf_counter() < until_s:
            load.step()


@dataclass(slots=True)
class _Load:
    engine: SteppedEngine
    last_s: dict[str, float] = field(default_factory=dict)  # of a stream: its last token
    due_s: dict[str, float] = field(default_factory=dict)  # prompts that wait for a first token
    waited_s: dict[str, float] = field(default_factory=dict)
    _streams: dict[str, int] = field(default_factory=dict)  # tokens left
    _gaps_s: list[float] = field(default_factory=list)

    def add_stream(self, prompt: list[int], num_tokens: int) -> None:
        request_id = next_request_id()
        self._streams[request_id] = num_tokens
        self.engine.add(request_id, prompt, num_tokens)

    def add(self, prompt: list[int], due_s: float) -> str:
        request_id = next_request_id()
        self.due_s[request_id] = due_s
        self.engine.add(request_id, prompt, NUM_ANSWER_TOKENS)
        return request_id

    def step(self) -> None:
        """Raises MeasurementFailed when a stream has no tokens left to decode."""
        progressed = self.engine.step()
        now_s = time.perf_counter()
        for request_id, count, _ in progressed:
            if not count:
                continue
            if request_id in self._streams:
                if request_id in self.last_s:
                    self._gaps_s.append(now_s - self.last_s[request_id])
                self.last_s[request_id] = now_s
                self._streams[request_id] -= count
                if self._streams[request_id] <= 0:
                    raise MeasurementFailed("a stream ended before the long prompt was answered")
            elif request_id in self.due_s:
                self.waited_s[request_id] = now_s - self.due_s.pop(request_id)

    def take_gaps(self) -> list[float]:
        """Those since the last time."""
        taken, self._gaps_s = self._gaps_s, []
        return taken

    def end(self) -> None:
        self.engine.abort([*self._streams, *self.due_s])
        while self.engine.has_work:
            self.engine.step()
