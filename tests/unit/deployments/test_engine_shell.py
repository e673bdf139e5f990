"""Journals, leases and accounting over the real engine (without Ray, over the fake executor)."""

import asyncio
import contextlib
import random
import threading

import pytest

from deployments.engine_shell import EngineShell, ShellOptions
from router.errors import BackendUnavailable, InvalidRequest, NotFound
from router.generation import FinishReason, GenerationRequest, SamplingSettings, TokenEvent, Usage
from tests.fakes.executor import FakeExecutor, expected_completion
from tests.fakes.rank import BLOCK_SIZE, VOCAB_SIZE, InProcessRank

PROMPT = tuple(range(1, 21))
LEASE_S = 30.0


class Throttle:
    """Holds the executor back until steps are handed out; `open` lets it run freely."""

    def __init__(self, num_steps: int = 0) -> None:
        self._steps = threading.Semaphore(num_steps)
        self._is_open = False

    def __call__(self) -> None:
        if not self._is_open:
            assert self._steps.acquire(timeout=20)

    def open(self) -> None:
        self._is_open = True
        self._steps.release(64)


def request(request_id: str = "r", *, max_tokens: int = 40, grace_s: float = 0.0, prompt=PROMPT):
    sampling = SamplingSettings(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(request_id, "m", tuple(prompt), sampling, grace_s=grace_s)


@contextlib.asynccontextmanager
async def running(throttle: Throttle | None = None, options: ShellOptions | None = None, **rank):
    executor = FakeExecutor(
        BLOCK_SIZE, vocab_size=VOCAB_SIZE, before_step=throttle or (lambda: None)
    )
    in_process = InProcessRank(rank.pop("executor", executor), **rank)
    shell = EngineShell(in_process, options or ShellOptions(lease_s=LEASE_S))
    shell.start()
    try:
        yield shell, in_process
    finally:
        if throttle is not None:
            throttle.open()
        in_process.engine.shutdown(10)
        await shell.stop()


async def read_all(
    shell: EngineShell, request_id: str, after_index: int = 0, into: list[TokenEvent] | None = None
) -> list[TokenEvent]:
    seen = [] if into is None else into
    async for events in shell.subscribe(request_id, after_index):
        seen += events
    return seen


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def until(condition, timeout_s: float = 1.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - another thread changes it
            await asyncio.sleep(0.005)


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


async def follow_all(shell: EngineShell, reader: str, num_ends: int) -> dict[str, list[TokenEvent]]:
    seen: dict[str, list[TokenEvent]] = {}
    async with contextlib.aclosing(shell.follow(reader)) as stream:
        async for events in stream:
            for event in events:
                seen.setdefault(event.request_id, []).append(event)
                num_ends -= event.finish_reason is not None
            if num_ends == 0:
                return seen
    return seen


async def test_a_follower_gets_all_of_its_own_and_nothing_else():
    async with running() as (shell, _):
        await shell.submit(request("before"), reader="one")
        following = asyncio.create_task(follow_all(shell, "one", 2))
        await shell.submit(request("after", max_tokens=3), reader="one")
        await shell.submit(request("others"), reader="other")
        seen = await following
        rest = await read_all(shell, "others")
    assert seen.keys() == {"before", "after"}
    for name, num_tokens in (("before", 40), ("after", 3)):
        assert tokens(seen[name]) == expected_completion(PROMPT, num_tokens, VOCAB_SIZE)
        ends = [event.index + len(event.token_ids) for event in seen[name]]
        assert [event.index for event in seen[name]] == [0, *ends[:-1]]
        assert seen[name][-1].usage == Usage(20, seen[name][-1].usage.cached_tokens, num_tokens)
    assert tokens(rest) == expected_completion(PROMPT, 40, VOCAB_SIZE)


async def test_what_a_follower_leaves_is_aborted_and_the_rest_goes_on():
    throttle = Throttle(3)
    async with running(throttle) as (shell, _):
        await shell.submit(request("kept"), reader="one")
        await shell.submit(request("left", max_tokens=450), reader="one")
        following = asyncio.create_task(follow_all(shell, "one", 1))
        await asyncio.sleep(0.05)
        leaving = asyncio.create_task(shell.leave("one", "left"))
        throttle.open()
        await leaving
        await shell.leave("one", "left")
        seen = await following
        assert shell._journals["left"].finish_reason is FinishReason.ABORT
    assert tokens(seen["kept"]) == expected_completion(PROMPT, 40, VOCAB_SIZE)


async def test_a_follower_that_dies_leaves_everything():
    throttle = Throttle(3)
    async with running(throttle) as (shell, _):
        await shell.submit(request("r", max_tokens=450), reader="one")
        await shell.submit(request("graced", grace_s=20.0), reader="one")
        following = asyncio.create_task(follow_all(shell, "one", 2))
        await asyncio.sleep(0.05)
        following.cancel()
        throttle.open()
        await asyncio.gather(following, return_exceptions=True)
        await until(lambda: shell._journals["r"].has_ended)
        assert shell._journals["r"].finish_reason is FinishReason.ABORT
        assert tokens(await read_all(shell, "graced")) == expected_completion(
            PROMPT, 40, VOCAB_SIZE
        )
        assert not shell._feeds


async def test_a_follower_ends_when_idle_and_comes_back(monkeypatch):
    monkeypatch.setattr("deployments.feed.IDLE_S", 0.01)
    async with running() as (shell, _):
        for name in ("r", "s"):
            await shell.submit(request(name), reader="one")
            assert (await follow_all(shell, "one", 99)).keys() == {name}
            assert not shell._feeds


async def test_a_follower_waits_for_a_step_that_takes_longer_than_idling(monkeypatch):
    monkeypatch.setattr("deployments.feed.IDLE_S", 0.1)
    throttle = Throttle()
    async with running(throttle) as (shell, _):
        following = asyncio.create_task(follow_all(shell, "one", 1))
        await asyncio.sleep(0.05)
        await shell.submit(request(), reader="one")
        await asyncio.sleep(0.3)
        throttle.open()
        assert tokens((await following)["r"]) == expected_completion(PROMPT, 40, VOCAB_SIZE)


async def test_a_follower_learns_that_the_engine_stopped():
    executor = FakeExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE, fail_at_step=4)
    async with running(executor=executor) as (shell, _):
        await shell.submit(request("r"), reader="one")
        with pytest.raises(BackendUnavailable, match="restarted"):
            await follow_all(shell, "one", 1)


async def test_nobody_follows_and_nothing_stays(monkeypatch):
    options = ShellOptions(lease_s=0.05, retention_s=0.05)
    throttle = Throttle(1)
    async with running(throttle, options) as (shell, _):
        await shell.submit(request("r"), reader="dead")
        await asyncio.sleep(0.1)
        throttle.open()
        await until(lambda: shell._journals["r"].has_ended, 3)
        await shell.acknowledge(["r"])
        await until(lambda: not shell._feeds and not shell._journals, 3)
