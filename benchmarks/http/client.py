"""One of the clients of a closed loop, each in a process of its own, so that no client is what
limits a server."""

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp

from benchmarks.http.stream import Arrival, Timing, stream, timing
from benchmarks.http.traffic import Request
from benchmarks.load import ExchangeFailed

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Told:
    """`concurrency` senders, the first at `start_s`, the last `ramp_s` later, each with its next
    request as soon as the last one is answered."""

    url: str
    key: str
    model: str
    requests: tuple[Request, ...]
    concurrency: int
    start_s: float
    ramp_s: float


@dataclass(slots=True)
class Answer:
    """`exhausted_s`: when the first sender found no request left."""

    exhausted_s: float
    timings: list[Timing] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


async def load(told: Told) -> Answer:
    waiting = iter(told.requests)
    arrivals: list[Arrival] = []
    failures: list[str] = []
    exhausted_s: list[float] = []

    async def sender(number: int, session: aiohttp.ClientSession) -> None:
        due_s = told.start_s + told.ramp_s * number / told.concurrency
        await asyncio.sleep(due_s - time.monotonic())
        for request in waiting:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    arrivals.append(await stream(session, told.model, request))
            except (ExchangeFailed, OSError, TimeoutError) as exc:
                failures.append(repr(exc))
        exhausted_s.append(time.monotonic())

    async with aiohttp.ClientSession(
        told.url,
        headers={"authorization": f"Bearer {told.key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        await asyncio.gather(*(sender(number, session) for number in range(told.concurrency)))
    return _read(arrivals, Answer(min(exhausted_s), failures=failures))


def _read(arrivals: list[Arrival], answer: Answer) -> Answer:
    for arrival in arrivals:
        try:
            answer.timings.append(timing(arrival))
        except (ExchangeFailed, ValueError) as exc:
            answer.failures.append(repr(exc))
    return answer
