"""Loads on the app and what their streams sum up to."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.load import LoadResult, closed_loop, open_loop, poisson_arrivals_s
from benchmarks.percentiles import percentile
from benchmarks.results import Row
from benchmarks.serving.stream import StreamTiming, timed_stream

HEADERS = {"anthropic-version": "2023-06-01"}
NUM_NEW_TOKENS = 32
TIMEOUT_S = 60.0
MAX_TTFT_MS, MAX_TPOT_MS = 2000.0, 200.0  # what a good answer keeps, for the goodput on a CPU
SUBJECTS = ("gravity", "tides", "bread", "bridges", "glaciers", "violins", "bees", "maps", "salt")


@dataclass(slots=True)
class Streams:
    """The streams of one load: its requests, each its own prompt, and their timings."""

    name: str
    client: httpx.AsyncClient
    model: str
    seed: int
    timings: list[StreamTiming] = field(default_factory=list)

    async def send(self, number: int) -> None:
        body = request_body(self.model, self.seed, number)
        self.timings.append(await timed_stream(self.client, body, HEADERS))

    async def closed(self, concurrency: int, num_requests: int) -> list[Row]:
        result = await closed_loop(concurrency, num_requests, self.send, TIMEOUT_S)
        return stream_rows(self.name, self.timings, result)

    async def open(self, rate_per_s: float, window_s: float) -> list[Row]:
        arrivals_s = poisson_arrivals_s(rate_per_s, window_s, self.seed)
        result = await open_loop(arrivals_s, window_s, self.send, TIMEOUT_S)
        return stream_rows(self.name, self.timings, result)


def request_body(model: str, seed: int, number: int) -> dict[str, object]:
    """Greedy, of a fixed length at most; no two share more than their first words."""
    draw = random.Random(seed * 1000 + number)
    subjects = draw.sample(SUBJECTS, 4)
    question = f"{draw.randrange(10_000)}: Write one paragraph about {', '.join(subjects)}."
    return {
        "model": model,
        "max_tokens": NUM_NEW_TOKENS,
        "temperature": 0,
        "stream": True,
        "messages": [{"role": "user", "content": question}],
    }


def stream_rows(name: str, timings: Sequence[StreamTiming], result: LoadResult) -> list[Row]:
    """Raises MeasurementFailed when nothing was served."""
    result.latency_ms(50)
    gaps_ms = [gap for timing in timings for gap in timing.gaps_ms]
    tpots_ms = [timing.tpot_ms for timing in timings if timing.tpot_ms is not None]
    num_good = sum(map(is_good, timings))
    rows = [
        *_percentile_rows(f"ttft_{name}", "time to first token", [t.ttft_ms for t in timings]),
        *_percentile_rows(f"itl_{name}", "gap between text events", gaps_ms),
    ]
    if tpots_ms:
        mean_ms = statistics.fmean(tpots_ms)
        rows.append(Row(f"tpot_{name}_mean", "time per token", "ms", "lower", mean_ms))
    num_tokens = sum(timing.num_tokens for timing in timings)
    goodput = num_good / result.num_offered
    good = f"within {MAX_TTFT_MS:.0f} ms TTFT and {MAX_TPOT_MS:.0f} ms TPOT"
    return [
        *rows,
        Row(f"tok_s_{name}", "output tokens", "tok/s", "higher", num_tokens / result.window_s),
        Row(f"goodput_{name}", f"share of requests {good}", "share", "higher", goodput),
        Row(f"failed_{name}", "failed", "share", "lower", 1 - result.served_share, floor=0),
    ]


def is_good(timing: StreamTiming) -> bool:
    return timing.ttft_ms <= MAX_TTFT_MS and (timing.tpot_ms or 0) <= MAX_TPOT_MS


def _percentile_rows(case: str, metric: str, samples: Sequence[float]) -> list[Row]:
    if not samples:
        return []
    return [
        Row(f"{case}_p{percent}", metric, "ms", "lower", percentile(samples, percent))
        for percent in (50, 95, 99)
    ]
