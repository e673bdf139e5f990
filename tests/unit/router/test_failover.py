"""The limits through outages of Redis: what passes is a replica's share, and is charged later."""

import pytest
from redis.asyncio import Redis

from router.errors import LimiterUnavailable
from router.limits.failover import FailoverLimiter
from router.limits.limiter import Limiter
from router.limits.policy import Admission, Limits
from router.teams import Team

CLOCK = "local function now_ms() return tonumber(redis.call('GET', 'test:now_ms')) end"
START_MS = 1_800_000_000_000


class FlakyLimiter(Limiter):
    """The real limiter; while it is down nothing arrives, or it arrives and no answer comes."""

    is_down = False
    arrives = False
    num_asked = 0

    async def admit(
        self, request_id: str, team: Team, num_input_tokens: int, est_output_tokens: int
    ) -> Admission:
        self.num_asked += 1
        if not self.is_down or self.arrives:
            answer = await super().admit(request_id, team, num_input_tokens, est_output_tokens)
        self.fail_if_down()
        return answer

    async def settle(self, request_id: str, team: Team, num_tokens_used: int) -> bool:
        self.fail_if_down()
        return await super().settle(request_id, team, num_tokens_used)

    async def charge(self, team: Team, num_requests: int, num_tokens: int) -> None:
        self.fail_if_down()
        await super().charge(team, num_requests, num_tokens)

    def fail_if_down(self) -> None:
        if self.is_down:
            raise LimiterUnavailable("down for the test")


class Bench:
    """Two replicas, each with its own line to Redis, and one clock for everybody."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.now_s = 0.0
        self.shared = [FlakyLimiter(redis, clock_lua=CLOCK) for _ in range(2)]
        self.replicas = [FailoverLimiter(each, 2, clock=self.clock) for each in self.shared]
        self.num_requests = 0

    def clock(self) -> float:
        return self.now_s

    async def at(self, seconds: float) -> None:
        self.now_s = seconds
        await self.redis.set("test:now_ms", START_MS + round(seconds * 1e3))

    def set_down(self, is_down: bool) -> None:
        for each in self.shared:
            each.is_down = is_down

    async def admit(self, team: Team, replica: int = 0, num_tokens: int = 0) -> Admission:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        return await self.replicas[replica].admit(request_id, team, num_tokens, 0)

    async def num_admitted(self, team: Team, num_tries: int) -> int:
        """Tries over both replicas in turn."""
        answers = [await self.admit(team, index % 2) for index in range(num_tries)]
        return sum(answer.is_allowed for answer in answers)


@pytest.fixture
async def bench(valkey: Redis) -> Bench:
    bench = Bench(valkey)
    await bench.at(0)
    return bench


def red(**limits: int) -> Team:
    return Team("red", limits=Limits(**limits))


async def test_replicas_share_what_was_left_when_redis_went(bench: Bench) -> None:
    team = red(requests_per_minute=100)
    assert await bench.num_admitted(team, 60) == 60
    bench.set_down(True)
    assert 36 <= await bench.num_admitted(team, 200) <= 41
    await bench.at(30)
    assert 48 <= await bench.num_admitted(team, 200) <= 50


async def test_an_outage_of_30_seconds_overshoots_by_less_than_a_tenth(bench: Bench) -> None:
    team = red(requests_per_minute=600)
    num_admitted = await bench.num_admitted(team, 700)
    for tenth in range(1, 901):
        bench.set_down(200 <= tenth < 500)
        await bench.at(tenth / 10)
        num_admitted += await bench.num_admitted(team, 2)
    allowed = 600 + 600 * 90 / 60
    assert 0.95 * allowed <= num_admitted <= allowed + 60


async def test_without_anything_seen_a_replica_takes_its_share(bench: Bench) -> None:
    bench.set_down(True)
    team = red(requests_per_minute=10, tokens_per_minute=1000)
    answers = [await bench.admit(team, num_tokens=10) for _ in range(6)]
    assert [answer.is_allowed for answer in answers] == [True] * 5 + [False]
    assert (answers[5].refused_by, answers[5].retry_after_s) == ("requests", 12.0)
    assert answers[0].tokens is not None
    assert (answers[0].tokens.limit, answers[0].tokens.remaining) == (500, 490)


async def test_what_passed_meanwhile_is_charged(bench: Bench) -> None:
    team = red(tokens_per_minute=1000)
    limiter = bench.replicas[0]
    bench.set_down(True)
    assert (await limiter.admit("outage", team, 300, 100)).is_allowed
    assert (await limiter.admit("outage", team, 300, 100)).is_allowed  # asked again: taken once
    bench.set_down(False)
    await bench.at(1)
    before = await bench.admit(team)
    assert before.tokens is not None
    assert before.tokens.remaining == 600
    assert await limiter.settle("outage", team, 150)
    after = await bench.admit(team)
    assert after.tokens is not None
    assert after.tokens.remaining == 850


async def test_settlements_wait_for_redis(bench: Bench) -> None:
    team = red(tokens_per_minute=1000)
    limiter = bench.replicas[0]
    for index in range(3):
        await limiter.admit(f"a{index}", team, 300, 0)
    bench.set_down(True)
    for index in range(3):
        assert await limiter.settle(f"a{index}", team, 100)
    bench.set_down(False)
    await bench.at(1)
    await bench.admit(team)  # replays, after its own answer
    left = (await bench.admit(team)).tokens
    assert left is not None
    assert left.remaining == 716  # 700 and a second's refill
    assert not await limiter.settle("a0", team, 0)


async def test_an_admission_whose_answer_was_lost_is_not_paid_twice(bench: Bench) -> None:
    team = red(tokens_per_minute=1000)
    bench.shared[0].arrives = True
    bench.set_down(True)
    assert (await bench.replicas[0].admit("lost", team, 400, 0)).is_allowed
    bench.set_down(False)
    await bench.at(1)
    await bench.admit(team)
    left = (await bench.admit(team)).tokens
    assert left is not None
    assert 600 <= left.remaining <= 633


async def test_redis_is_left_alone_for_a_second_after_a_failure(bench: Bench) -> None:
    team = red(requests_per_minute=100)
    bench.set_down(True)
    for _ in range(10):
        await bench.admit(team)
    assert bench.shared[0].num_asked == 1
    assert not bench.replicas[0].is_shared
    await bench.at(1)
    bench.set_down(False)
    assert bench.replicas[0].is_shared
    await bench.admit(team)
    assert bench.shared[0].num_asked == 2


async def test_leases_count_as_held_while_nobody_can_be_asked(bench: Bench) -> None:
    team = red(requests_per_minute=100)
    limiter = bench.replicas[0]
    await limiter.admit("held", team, 0, 0)
    assert await limiter.renew(team, ["held", "unknown"]) == {"held"}
    bench.set_down(True)
    await bench.admit(team)
    assert await limiter.renew(team, ["held", "unknown"]) == {"held", "unknown"}
