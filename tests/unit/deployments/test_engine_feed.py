"""Followers: one stream of all that a reader's generations are given."""

import asyncio
import contextlib

import pytest

from deployments.engine_shell import EngineShell, ShellOptions
from router.errors import BackendUnavailable
from router.generation import FinishReason, TokenEvent, Usage
from tests.fakes.executor import FakeExecutor, expected_completion
from tests.fakes.rank import BLOCK_SIZE, VOCAB_SIZE
from tests.unit.deployments.shells import (
    PROMPT,
    Throttle,
    read_all,
    request,
    running,
    tokens,
    until,
)


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
