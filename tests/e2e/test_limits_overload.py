"""Four router processes against one Valkey at ten times what is allowed: never more than the burst
and the refill pass, in any of ten runs."""

import asyncio
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest

from router.limits.limiter import Limiter, connect
from router.limits.policy import Limits
from router.teams import Team

NUM_PROCESSES = 4
NUM_CLIENTS = 8
RUN_S = 2.0
OVERLOAD = 10


@dataclass
class Run:
    """What one process saw; times are the limiter's own clock."""

    num_attempts: int
    num_tokens_used: list[int]  # by each admitted request
    admitted_ms: list[int]


def overload(url: str, team: Team, num_tokens: int, use_less: bool, start_unix_s: float) -> Run:
    return asyncio.run(_overload(url, team, num_tokens, use_less, start_unix_s))


async def _overload(
    url: str, team: Team, num_tokens: int, use_less: bool, start_unix_s: float
) -> Run:
    run = Run(0, [], [])

    async def client(number: int) -> None:
        while time.time() < start_unix_s + RUN_S:
            request_id = f"{start_unix_s}-{random.getrandbits(64):x}-{number}"
            admission = await limiter.admit(request_id, team, num_tokens // 2, num_tokens // 2)
            run.num_attempts += 1
            if admission.is_allowed:
                num_used = random.randint(0, num_tokens) if use_less else num_tokens
                run.num_tokens_used.append(num_used)
                run.admitted_ms.append(round(admission.unix_s * 1e3))
                await limiter.settle(request_id, team, num_used)

    async with connect(url, timeout_s=5.0) as redis:
        limiter = Limiter(redis)
        await redis.ping()
        await asyncio.sleep(max(0.0, start_unix_s - time.time()))
        await asyncio.gather(*map(client, range(NUM_CLIENTS)))
    return run


def process_id(_: int) -> int:
    time.sleep(0.1)  # long enough for each process to take one
    return os.getpid()


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context) as pool:
        while len(set(pool.map(process_id, range(NUM_PROCESSES)))) < NUM_PROCESSES:
            pass
        yield pool


@pytest.mark.parametrize("run", range(10))
def test_overload_never_passes_the_limit(
    processes: ProcessPoolExecutor, valkey_server: str, run: int
) -> None:
    """Odd runs are bound by requests, even ones by tokens, and every other of each gives back part
    of its reservations."""
    is_bound_by_requests, use_less = run % 2 == 1, run % 4 >= 2
    num_tokens, allowance = 20, 150
    requests_per_minute = allowance if is_bound_by_requests else 10**6
    tokens_per_minute = 10**8 if is_bound_by_requests else allowance * num_tokens
    team = Team(f"overload-{run}", limits=Limits(requests_per_minute, tokens_per_minute))
    start_unix_s = time.time() + 0.3
    futures = [
        processes.submit(overload, valkey_server, team, num_tokens, use_less, start_unix_s)
        for _ in range(NUM_PROCESSES)
    ]
    runs = [future.result(timeout=60) for future in futures]
    assert all(each.num_attempts for each in runs)
    assert sum(each.num_attempts for each in runs) >= OVERLOAD * allowance
    admitted_ms = [at_ms for each in runs for at_ms in each.admitted_ms]
    num_tokens_used = sum(sum(each.num_tokens_used) for each in runs)
    minute_and_run_ms = 60_000 + max(admitted_ms) - min(admitted_ms)
    assert len(admitted_ms) * 60_000 <= requests_per_minute * minute_and_run_ms
    assert num_tokens_used * 60_000 <= tokens_per_minute * minute_and_run_ms
    num_spent = len(admitted_ms) if is_bound_by_requests else num_tokens_used / num_tokens
    assert num_spent >= 0.95 * allowance  # and nothing that is allowed is lost
