import asyncio
import itertools
import time

import pytest

from benchmarks.errors import MeasurementFailed
from benchmarks.load import ExchangeFailed, closed_loop, open_loop, poisson_arrivals_s


def test_arrivals_repeat_for_a_seed_and_have_the_rate():
    arrivals_s = poisson_arrivals_s(50, 100, seed=7)
    assert arrivals_s == poisson_arrivals_s(50, 100, seed=7) == sorted(arrivals_s)
    assert arrivals_s != poisson_arrivals_s(50, 100, seed=8)
    assert 0 <= arrivals_s[0] <= arrivals_s[-1] < 100
    assert len(arrivals_s) == pytest.approx(5000, rel=0.05)


def test_gaps_of_arrivals_are_exponential():
    arrivals_s = poisson_arrivals_s(50, 200, seed=1)
    gaps_s = [b - a for a, b in itertools.pairwise(arrivals_s)]
    shorter_than_the_mean = sum(gap < 1 / 50 for gap in gaps_s) / len(gaps_s)
    assert shorter_than_the_mean == pytest.approx(0.632, abs=0.02)  # 1 - 1/e


async def test_an_open_loop_does_not_wait_for_answers():
    running, most = 0, 0

    async def send(_number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1

    result = await open_loop([0.0, 0.01, 0.02, 0.03], 0.04, send, timeout_s=5)

    assert most == 4
    assert result.served_share == 1
    assert result.served_per_s == pytest.approx(100)
    assert result.latency_ms(0) >= 100


async def test_latency_counts_from_the_due_time_when_the_sender_is_late():
    async def send(_number: int) -> None:
        time.sleep(0.05)  # noqa: ASYNC251  # the loop stalls, and the second is sent late

    result = await open_loop([0.0, 0.0], 0.01, send, timeout_s=5)

    assert result.latency_ms(100) >= 100


async def test_failures_are_counted_and_kept_out_of_the_latencies():
    async def send(number: int) -> None:
        if number == 0:
            raise ExchangeFailed("500")
        if number == 1:
            await asyncio.sleep(60)
        if number == 2:
            raise ConnectionResetError

    result = await open_loop([0.0, 0.0, 0.0, 0.0], 0.1, send, timeout_s=0.2)

    assert len(result.latencies_ms) == 1
    assert result.served_share == 0.25
    assert len(result.failures) == 3


async def test_a_bug_in_the_sender_is_not_a_failed_request():
    async def send(_number: int) -> None:
        raise KeyError("bug")

    with pytest.raises(ExceptionGroup):
        await open_loop([0.0], 0.1, send, timeout_s=1)


async def test_a_closed_loop_keeps_so_many_running_and_sends_each_once():
    running, most, numbers = 0, 0, []

    async def send(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        numbers.append(number)
        await asyncio.sleep(0.01)
        running -= 1

    result = await closed_loop(3, 10, send, timeout_s=5)

    assert most == 3
    assert sorted(numbers) == list(range(10))
    assert len(result.latencies_ms) == result.num_offered == 10
    assert result.window_s >= 0.04


async def test_nothing_served_has_no_latency():
    async def send(_number: int) -> None:
        raise ExchangeFailed("401 unauthorized")

    result = await closed_loop(1, 2, send, timeout_s=5)

    with pytest.raises(MeasurementFailed, match="401 unauthorized"):
        result.latency_ms(50)
