"""Journals, leases and accounting over the real engine (without Ray, over the fake executor)."""

import asyncio
import random

import pytest

from deployments.engine_shell import EngineShell, ShellOptions
from router.errors import BackendUnavailable, InvalidRequest, NotFound
from router.generation import FinishReason, GenerationRequest, SamplingSettings, TokenEvent, Usage
from tests.fakes.executor import FakeExecutor, expected_completion
from tests.fakes.rank import BLOCK_SIZE, VOCAB_SIZE, InProcessRank
from tests.unit.deployments.shells import (
    LEASE_S,
    PROMPT,
    Throttle,
    read_all,
    request,
    running,
    tokens,
    until,
)


async def test_a_reader_gets_every_token_once_and_in_order():
    async with running() as (shell, _):
        await shell.submit(request())
        events = await read_all(shell, "r")
    assert tokens(events) == expected_completion(PROMPT, 40, VOCAB_SIZE)
    ends = [event.index + len(event.token_ids) for event in events]
    assert [event.index for event in events] == [0, *ends[:-1]]
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].usage == Usage(20, 0, 40)


async def test_a_second_reader_continues_where_a_dead_one_stopped():
    throttle = Throttle(5)
    async with running(throttle) as (shell, _):
        await shell.submit(request(grace_s=20.0))
        first = shell.subscribe("r")
        seen = tokens(await anext(first))
        while len(seen) < 4:
            seen += tokens(await anext(first))
        await first.aclose()
        throttle.open()
        rest = await read_all(shell, "r", after_index=len(seen))
    assert seen + tokens(rest) == expected_completion(PROMPT, 40, VOCAB_SIZE)
    assert rest[0].index == len(seen)


async def test_two_readers_at_once_see_the_same():
    async with running() as (shell, _):
        await shell.submit(request())
        one, other = await asyncio.gather(read_all(shell, "r"), read_all(shell, "r", 10))
    assert tokens(one)[10:] == tokens(other)


async def test_an_ended_generation_can_still_be_read():
    async with running() as (shell, _):
        await shell.submit(request())
        once = await read_all(shell, "r")
        again = await read_all(shell, "r")
        last = await read_all(shell, "r", after_index=40)
    assert tokens(once) == tokens(again)
    assert [event.finish_reason for event in last] == [FinishReason.LENGTH]
    assert tokens(last) == []


async def test_an_ordinary_reader_that_leaves_aborts_at_once():
    throttle = Throttle(3)
    async with running(throttle) as (shell, rank):
        await shell.submit(request())
        reader = shell.subscribe("r")
        await anext(reader)
        throttle.open()
        await reader.aclose()
        await until(lambda: rank.engine.stats.num_running == 0)
        assert rank.allocator.num_free_blocks == 64
        rank.allocator.check_integrity([])


async def test_abort_gives_the_engines_own_usage_and_is_idempotent():
    throttle = Throttle(6)
    async with running(throttle) as (shell, rank):
        await shell.submit(request())
        reader = shell.subscribe("r")
        await anext(reader)
        throttle.open()
        usage = await shell.abort("r")
        assert usage == await shell.abort("r")
        last = [event async for events in reader for event in events][-1]
        assert last.finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        assert last.usage == usage
        assert rank.engine.totals.completion_tokens == usage.completion_tokens
        assert await shell.abort("nobody") is None


async def test_a_lease_that_nobody_takes_or_renews_runs_out():
    now_s = 0.0
    throttle = Throttle(2)
    executor = FakeExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE, before_step=throttle)
    rank = InProcessRank(executor)
    shell = EngineShell(rank, ShellOptions(lease_s=10.0, retention_s=60.0), clock=lambda: now_s)
    shell.start()
    try:
        await shell.submit(request("unread"))
        await shell.submit(request("read"))
        reader = shell.subscribe("read")
        await anext(reader)
        now_s = 8.0
        await shell.renew(["read", "unread", "nobody"])
        now_s = 12.0
        expiry = asyncio.create_task(shell._abort_expired(list(shell._journals.values())))
        await asyncio.sleep(0.05)  # the abort is queued behind the step that is held back
        throttle.open()
        await expiry
        assert (await read_all(shell, "unread"))[-1].finish_reason is FinishReason.ABORT
        rest = [event async for events in reader for event in events]
        assert rest[-1].finish_reason is FinishReason.LENGTH
        await shell.acknowledge(["read", "unread", "nobody"])
        now_s = 200.0
        await until(lambda: shell.num_journals == 0)
        with pytest.raises(NotFound, match="unknown here or has expired"):
            await read_all(shell, "read")
    finally:
        throttle.open()
        rank.engine.shutdown(10)
        await shell.stop()


async def test_refusals_reach_the_caller_and_leave_no_journal():
    async with running() as (shell, _):
        with pytest.raises(InvalidRequest, match="512"):
            await shell.submit(request(max_tokens=500))
        sampling = SamplingSettings(max_tokens=4, temperature=-1.0)
        with pytest.raises(InvalidRequest, match="temperature"):
            await shell.submit(GenerationRequest("r", "m", PROMPT, sampling))
        assert shell.num_journals == 0
        await shell.submit(request())
        with pytest.raises(InvalidRequest, match="already in use"):
            await shell.submit(request())
        assert len(tokens(await read_all(shell, "r"))) == 40


async def test_an_engine_that_dies_fails_its_readers_with_a_type():
    executor = FakeExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE, fail_at_step=4)
    async with running(executor=executor) as (shell, _):
        assert (await shell.status()).ready
        await shell.submit(request())
        seen: list[TokenEvent] = []
        with pytest.raises(BackendUnavailable, match="restarted"):
            await read_all(shell, "r", into=seen)
        assert tokens(seen) == expected_completion(PROMPT, 40, VOCAB_SIZE)[: len(tokens(seen))]
        with pytest.raises(BackendUnavailable, match="restarting"):
            await shell.submit(request("s"))
        status = await shell.status()
        assert not status.ready
        assert "fake failure" in status.reason


async def test_a_pump_that_breaks_fails_its_readers_too():
    """Not only the errors we know: a reader must never wait for a pump that has ended."""

    class BrokenRank(InProcessRank):
        async def next_outputs(self):
            raise ValueError("garbage from the rank")

    rank = BrokenRank()
    shell = EngineShell(rank, ShellOptions(lease_s=LEASE_S))
    shell.start()
    try:
        await shell.submit(request())
        with pytest.raises(BackendUnavailable, match="restarted"):
            await asyncio.wait_for(read_all(shell, "r"), 5)
        assert "garbage from the rank" in (await shell.status()).reason
    finally:
        rank.engine.shutdown(10)
        await shell.stop()


async def test_an_unaccounted_generation_is_dropped_at_last_and_said(caplog):
    now_s = 0.0
    rank = InProcessRank()
    shell = EngineShell(rank, ShellOptions(retention_s=60.0), clock=lambda: now_s)
    shell.start()
    try:
        await shell.submit(request())
        await read_all(shell, "r")
        now_s = 3000.0
        await shell._abort_expired(list(shell._journals.values()))
        assert shell.num_journals == 1
        now_s = 4000.0
        await until(lambda: shell.num_journals == 0)
        assert "never accounted for request_id=r" in caplog.text
    finally:
        rank.engine.shutdown(10)
        await shell.stop()


async def test_a_stalled_step_is_not_ready_only_with_work_in_flight():
    throttle = Throttle(0)
    async with running(throttle, ShellOptions(step_timeout_s=0.05)) as (shell, _):
        await asyncio.sleep(0.1)
        assert (await shell.status()).ready
        await shell.submit(request())
        await asyncio.sleep(0.1)
        status = await shell.status()
        assert not status.ready
        assert "no step finished" in status.reason


async def test_sixteen_streams_with_random_disconnects_leak_nothing_and_lose_nothing():
    """Readers come, leave for good, or leave and come back; the rest must be untouched."""
    random.seed(7)
    prompts = [tuple(range(i % 5, i % 5 + 10 + 7 * (i % 4))) for i in range(16)]
    async with running() as (shell, rank):

        async def stays(number: int) -> list[int]:
            await shell.submit(request(f"r{number}", prompt=prompts[number], max_tokens=60))
            return tokens(await read_all(shell, f"r{number}"))

        async def leaves(number: int) -> None:
            await shell.submit(request(f"r{number}", prompt=prompts[number], max_tokens=60))
            reader = shell.subscribe(f"r{number}")
            for _ in range(random.randint(0, 5)):
                await anext(reader, None)
            await reader.aclose()

        async def returns(number: int) -> list[int]:
            generation = request(f"r{number}", prompt=prompts[number], max_tokens=60, grace_s=20.0)
            await shell.submit(generation)
            seen: list[int] = []
            for _ in range(3):
                reader = shell.subscribe(f"r{number}", len(seen))
                seen += tokens(await anext(reader, []))
                await reader.aclose()
            return seen + tokens(await read_all(shell, f"r{number}", len(seen)))

        kinds = [stays, leaves, returns, leaves]
        results = await asyncio.gather(*(kinds[n % 4](n) for n in range(16)))
        await until(lambda: rank.engine.stats.num_running + rank.engine.stats.num_waiting == 0)
        await until(lambda: all(journal.has_ended for journal in shell._journals.values()))
        assert rank.allocator.num_free_blocks == 64
        rank.allocator.check_integrity([])
        journals = {name: journal.usage for name, journal in shell._journals.items()}
        assert rank.engine.totals.completion_tokens == sum(
            usage.completion_tokens for usage in journals.values()
        )
    for number, result in enumerate(results):
        if result is not None:
            assert result == expected_completion(prompts[number], 60, VOCAB_SIZE)
