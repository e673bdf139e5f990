"""Tables are swapped whole, targets are chosen by right, health is learned from requests."""

import asyncio
import time
from pathlib import Path

import pytest

from router.backends.attempts import Attempts
from router.errors import (
    BackendError,
    BackendUnavailable,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    UpstreamRefusal,
)
from router.routes import RoutesError, Target
from router.teams import Team
from tests.fakes.backend import FakeBackend
from tests.fakes.routed import ALL, KEY_ENV, ROUTES, UPSTREAM_KEY, Routed, claude_body
from tests.fakes.router import MODEL
from tests.fakes.upstream import stream

LOCAL = Target("local", MODEL)


@pytest.fixture
def routed(smollm2_path: Path, monkeypatch) -> Routed:
    monkeypatch.setenv(KEY_ENV, UPSTREAM_KEY)
    return Routed(smollm2_path, FakeBackend(token_ids=(504, 2)))


@pytest.mark.parametrize(
    ("backends", "egress", "model", "targets"),
    [
        (ALL, True, "outward", [LOCAL, Target("direct", "up")]),
        (ALL, False, "outward", [LOCAL]),
        (ALL, True, "inward", [LOCAL]),
        ({"local"}, True, "outward", [LOCAL]),
        ({"proxy"}, False, "safe", [Target("proxy", "up")]),
        ({"local"}, False, "safe", [LOCAL]),
        ({"proxy", "direct", "gpt"}, False, "twice", ["proxy", "gpt"]),
        ({"direct"}, False, "claude", [Target("direct", "claude-up")]),
    ],
)
def test_targets(routed, backends, egress, model, targets):
    team = Team("red", backends=frozenset(backends), egress=egress)
    found = routed.pool.targets(routed.pool.table.find(model), team)
    names = [each.backend if isinstance(targets[0], str) else each for each in found]
    assert names == targets


def test_a_team_that_may_reach_nothing(routed):
    with pytest.raises(PermissionDenied, match="team red may reach no backend of model claude"):
        routed.pool.targets(routed.pool.table.find("claude"), Team("red"))


async def test_an_invalid_table_is_refused_and_the_old_one_stays(routed):
    before = routed.pool.table
    with pytest.raises(RoutesError):
        routed.pool.replace_routes([{"model": "x", "targets": [{"backend": "no", "model": "m"}]}])
    assert routed.pool.table is before
    async with routed.client() as client:
        status = (await client.get("/v1/status")).json()
        metrics = (await client.get("/metrics")).text
        assert "expected one of direct, gpt, local, proxy, got 'no'" in status["routes_rejected"]
        assert "flashray:routes_rejected_total 1.0" in metrics
        routed.pool.replace_routes(ROUTES[:1])
        status = (await client.get("/v1/status")).json()
    assert status["routes_rejected"] is None
    assert [route["model"] for route in status["routes"]] == ["claude"]


async def test_a_new_table_does_not_touch_a_running_stream(routed):
    async with routed.client() as client:
        text = stream("anthropic_many").chunks[0]
        slow = stream("anthropic_many", delay_s=0.05)
        pieces = tuple(text[i : i + 400] for i in range(0, len(text), 400))
        slow = type(slow)(pieces, delay_s=0.005)
        routed.upstreams["direct"].default = slow
        body = claude_body("claude", stream=True)
        running = [asyncio.create_task(client.post("/v1/messages", json=body)) for _ in range(16)]
        await asyncio.sleep(0.02)
        routed.pool.replace_routes(
            [{"model": "claude", "targets": [{"backend": "local", "model": MODEL}]}]
        )
        moved = await client.post("/v1/messages", json=body)
        answers = await asyncio.gather(*running)
    assert moved.headers["x-flashray-backend"] == "local"
    assert {answer.headers["x-flashray-backend"] for answer in answers} == {"direct"}
    assert {answer.content for answer in answers} == {text}


def test_choosing_takes_less_than_a_millisecond(routed):
    route, team = routed.pool.table.find("twice"), Team("red", backends=ALL)
    started_s = time.perf_counter()
    for _ in range(100):
        routed.pool.targets(route, team)
    assert (time.perf_counter() - started_s) / 100 < 1e-3


@pytest.mark.parametrize("error", [UpstreamRefusal("bad"), Overloaded("busy")])
def test_an_upstream_that_answers_is_alive(routed, error):
    for _ in range(5):
        with pytest.raises(type(error)), routed.pool.judged("proxy"):
            raise error
    assert not routed.pool.breakers["proxy"].is_open


async def test_a_cancelled_trial_does_not_keep_the_breaker_shut(routed):
    breaker = routed.pool.breakers["proxy"]
    for _ in range(3):
        with pytest.raises(BackendError), routed.pool.judged("proxy"):
            raise BackendError("down")
    breaker._opened_s -= 10
    assert breaker.admit()
    with pytest.raises(asyncio.CancelledError), routed.pool.judged("proxy"):
        raise asyncio.CancelledError
    assert breaker.can_try()


async def test_attempts_in_order(routed):
    targets = [Target("proxy", "a"), Target("gpt", "b"), Target("direct", "c"), LOCAL]
    attempts = Attempts(targets, routed.pool)
    assert await attempts.next_target() == targets[0]
    attempts.failed(BackendUnavailable("first"))
    assert await attempts.next_target() == targets[1]
    attempts.failed(InvalidRequest("cannot"))
    assert await attempts.next_target() == LOCAL  # a third upstream would be one too many
    attempts.failed(InvalidRequest("cannot"))
    with pytest.raises(BackendUnavailable, match="first"):
        await attempts.next_target()


async def test_a_wait_is_of_the_target_that_asked_for_it(routed):
    targets = [Target("proxy", "a"), Target("gpt", "b")]
    attempts = Attempts(targets, routed.pool)
    assert await attempts.next_target() == targets[0]
    attempts.failed(Overloaded("busy", retry_after_s=0.01))
    assert await attempts.next_target() == targets[0]
    attempts.failed(Overloaded("busy", retry_after_s=0.01))
    with pytest.raises(Overloaded):
        await attempts.next_target()
    assert attempts.num_upstream == 2
