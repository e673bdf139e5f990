"""Load on a service: an open loop of timed arrivals, or a closed loop of so many at once."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.errors import MeasurementFailed
from benchmarks.percentiles import percentile

Send = Callable[[int], Awaitable[None]]
"""Sends the request of this number; returns once it is answered well. Raises ExchangeFailed."""


class ExchangeFailed(Exception):
    """One request that was refused, broken or answered with something else."""


@dataclass(slots=True)
class LoadResult:
    """`latencies_ms` of the requests that were answered well, counted from their due time: what a
    late sender adds is part of it, so a stalled service cannot hide the requests behind it."""

    num_offered: int
    window_s: float
    latencies_ms: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def served_share(self) -> float:
        return len(self.latencies_ms) / self.num_offered

    @property
    def served_per_s(self) -> float:
        return len(self.latencies_ms) / self.window_s

    def latency_ms(self, percent: float) -> float:
        """Raises MeasurementFailed when nothing was served."""
        if not self.latencies_ms:
            shown = self.failures[0] if self.failures else "nothing was offered"
            raise MeasurementFailed(f"none of {self.num_offered} requests was served: {shown}")
        return percentile(self.latencies_ms, percent)


def poisson_arrivals_s(rate_per_s: float, window_s: float, seed: int) -> list[float]:
    """Due times in [0, window_s), rising; the same for the same seed."""
    draw = random.Random(seed)
    arrivals: list[float] = []
    due_s = draw.expovariate(rate_per_s)
    while due_s < window_s:
        arrivals.append(due_s)
        due_s += draw.expovariate(rate_per_s)
    return arrivals


async def open_loop(
    arrivals_s: Sequence[float], window_s: float, send: Send, timeout_s: float
) -> LoadResult:
    """Send each request at its due time, whatever became of the others. A request that is not
    answered `timeout_s` after it was due has failed, so this ends by `window_s + timeout_s`."""
    result = LoadResult(len(arrivals_s), window_s)
    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as running:
        for number, arrival_s in enumerate(arrivals_s):
            due_s = start_s + arrival_s
            await asyncio.sleep(due_s - time.perf_counter())
            running.create_task(_timed(result, send, number, due_s, timeout_s))
    return result


async def closed_loop(
    concurrency: int, num_requests: int, send: Send, timeout_s: float
) -> LoadResult:
    """`concurrency` senders, each with its next request as soon as the last one is answered."""
    numbers = iter(range(num_requests))
    result = LoadResult(num_requests, 0.0)
    start_s = time.perf_counter()

    async def sender() -> None:
        for number in numbers:
            await _timed(result, send, number, time.perf_counter(), timeout_s)

    await asyncio.gather(*(sender() for _ in range(concurrency)))
    result.window_s = time.perf_counter() - start_s
    return result


async def _timed(
    result: LoadResult, send: Send, number: int, due_s: float, timeout_s: float
) -> None:
    remaining_s = due_s + timeout_s - time.perf_counter()
    try:
        async with asyncio.timeout(remaining_s):
            await send(number)
    except (ExchangeFailed, OSError, TimeoutError) as exc:
        result.failures.append(repr(exc))
    else:
        result.latencies_ms.append((time.perf_counter() - due_s) * 1e3)
