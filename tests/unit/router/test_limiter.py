"""The limiter against a real server whose clock is a key: no test sleeps."""

import asyncio

import pytest
from redis.asyncio import Redis

from router.errors import BackendUnavailable, LimiterUnavailable
from router.limits.limiter import Limiter, connect
from router.limits.policy import Admission, Allowance, Limits, est_output_tokens
from router.teams import Team

CLOCK = "local function now_ms() return tonumber(redis.call('GET', 'test:now_ms')) end"
START_MS = 1_800_000_000_000


class Bench:
    """A limiter and its hand-driven clock."""

    def __init__(self, redis: Redis) -> None:
        self.redis = redis
        self.limiter = Limiter(redis, lease_s=60.0, clock_lua=CLOCK)
        self.now_ms = START_MS

    async def at(self, seconds: float) -> None:
        self.now_ms = START_MS + round(seconds * 1e3)
        await self.redis.set("test:now_ms", self.now_ms)

    async def admit(self, team: Team, request_id: str, num_tokens: int = 0) -> Admission:
        return await self.limiter.admit(request_id, team, num_tokens, 0)

    async def state(self) -> dict[str, object]:
        """Everything stored, to show that nothing was written."""
        buckets, leases, reservations = (
            f"flashray:{{red}}:{part}" for part in ("buckets", "leases", "reservations")
        )
        return {
            "buckets": await self.redis.hgetall(buckets),
            "leases": await self.redis.zrange(leases, 0, -1, withscores=True),
            "reservations": await self.redis.hgetall(reservations),
        }


@pytest.fixture
async def bench(valkey: Redis) -> Bench:
    bench = Bench(valkey)
    await bench.at(0)
    return bench


def red(**limits: int) -> Team:
    return Team("red", limits=Limits(**limits))


async def test_admits_up_to_the_burst_then_says_how_long_to_wait(bench: Bench) -> None:
    team = red(requests_per_minute=3)
    remaining = [(await bench.admit(team, f"r{index}")).requests for index in range(3)]
    assert remaining == [
        Allowance(limit=3, remaining=2, reset_s=20.0),
        Allowance(limit=3, remaining=1, reset_s=40.0),
        Allowance(limit=3, remaining=0, reset_s=60.0),
    ]
    refusal = await bench.admit(team, "r3")
    assert not refusal.is_allowed
    assert (refusal.refused_by, refusal.retry_after_s) == ("requests", 20.0)
    assert refusal.unix_s == START_MS / 1e3


async def test_the_wait_that_was_told_is_exact(bench: Bench) -> None:
    team = red(requests_per_minute=7)
    for index in range(7):
        assert (await bench.admit(team, f"r{index}")).is_allowed
    wait_s = (await bench.admit(team, "early")).retry_after_s
    assert wait_s == 8.572
    await bench.at(wait_s - 0.001)
    assert not (await bench.admit(team, "a millisecond early")).is_allowed
    await bench.at(wait_s)
    assert (await bench.admit(team, "in time")).is_allowed


async def test_refills_continuously_and_exactly_at_any_rate(bench: Bench) -> None:
    team = red(tokens_per_minute=999_999_937)
    await bench.admit(team, "all", 999_999_937)
    for step in range(1, 101):  # each answer would keep a rounding error
        await bench.at(step * 0.007)
        assert (await bench.admit(team, f"nothing-{step}")).is_allowed
    left = await bench.admit(team, "look")
    assert left.tokens is not None
    assert left.tokens.remaining == 999_999_937 * 700 // 60_000


async def test_a_refusal_takes_nothing_from_any_dimension(bench: Bench) -> None:
    team = red(requests_per_minute=10, tokens_per_minute=100, max_concurrent_requests=1)
    assert (await bench.admit(team, "first", 60)).is_allowed
    before = await bench.state()
    assert (await bench.admit(team, "too many tokens", 41)).refused_by == "tokens"
    assert (await bench.admit(team, "one too many", 1)).refused_by == "concurrency"
    assert await bench.state() == before


async def test_the_longest_wait_names_the_dimension(bench: Bench) -> None:
    team = red(requests_per_minute=1, tokens_per_minute=60)
    assert (await bench.admit(team, "first", 60)).is_allowed
    cheap, dear = await bench.admit(team, "cheap", 1), await bench.admit(team, "dear", 60)
    assert (cheap.refused_by, cheap.retry_after_s) == ("requests", 60.0)
    assert (dear.refused_by, dear.retry_after_s) == ("requests", 60.0)
    await bench.limiter.settle("first", team, 120)
    in_debt = await bench.admit(team, "in debt", 60)
    assert (in_debt.refused_by, in_debt.retry_after_s) == ("tokens", 120.0)


async def test_concurrency_is_refused_with_a_short_spread_wait(bench: Bench) -> None:
    team = red(max_concurrent_requests=2)
    for index in range(2):
        assert (await bench.admit(team, f"r{index}")).is_allowed
    waits = {(await bench.admit(team, f"w{index}")).retry_after_s for index in range(20)}
    assert all(wait_s is not None and 0.25 <= wait_s <= 1.0 for wait_s in waits)
    assert len(waits) > 1
    assert await bench.limiter.settle("r0", team, 0)
    assert (await bench.admit(team, "after")).is_allowed


async def test_the_same_request_gets_its_first_answer_again(bench: Bench) -> None:
    team = red(requests_per_minute=5, tokens_per_minute=100)
    first = await bench.admit(team, "r", 30)
    before = await bench.state()
    await bench.at(10)
    assert await bench.admit(team, "r", 30) == first
    assert await bench.state() == before


async def test_settling_gives_back_what_was_not_used_once(bench: Bench) -> None:
    team = red(tokens_per_minute=100)
    await bench.admit(team, "r", 80)
    assert await bench.limiter.settle("r", team, 50)
    assert not await bench.limiter.settle("r", team, 0)
    assert (await bench.admit(team, "next", 50)).tokens == Allowance(100, 0, 60.0)


async def test_settling_beyond_the_reservation_leaves_a_debt(bench: Bench) -> None:
    team = red(tokens_per_minute=60)
    await bench.admit(team, "r", 30)
    await bench.limiter.settle("r", team, 150)  # 90 below zero
    refusal = await bench.admit(team, "next", 1)
    assert refusal.tokens == Allowance(limit=60, remaining=0, reset_s=150.0)
    assert refusal.retry_after_s == 91.0


async def test_a_refund_never_overfills_the_bucket(bench: Bench) -> None:
    team = red(tokens_per_minute=60)
    await bench.admit(team, "r", 30)
    await bench.at(59)
    await bench.limiter.settle("r", team, 0)
    assert (await bench.admit(team, "all", 60)).tokens == Allowance(60, 0, 60.0)


async def test_a_lease_that_ran_out_counts_as_used(bench: Bench) -> None:
    team = red(tokens_per_minute=600, max_concurrent_requests=1)
    await bench.admit(team, "crashed", 600)
    await bench.at(59.999)
    assert (await bench.admit(team, "waits", 1)).refused_by == "concurrency"
    await bench.at(60)
    assert (await bench.admit(team, "next", 600)).is_allowed
    assert not await bench.limiter.settle("crashed", team, 0)
    assert (await bench.limiter.settle("next", team, 600)) is True
    assert (await bench.state())["reservations"] == {}


async def test_a_late_settle_corrects_nothing_even_unswept(bench: Bench) -> None:
    team = red(tokens_per_minute=600)
    await bench.admit(team, "late", 600)
    await bench.at(60)
    before = await bench.state()
    assert not await bench.limiter.settle("late", team, 0)
    assert (await bench.state())["buckets"] == before["buckets"]


async def test_renewed_leases_live_on(bench: Bench) -> None:
    team = red(tokens_per_minute=600)
    await bench.admit(team, "long", 300)
    await bench.admit(team, "crashed", 1)
    await bench.at(50)
    assert await bench.limiter.renew(team, ["long", "unknown"]) == {"long"}
    await bench.at(109)
    assert await bench.limiter.renew(team, ["long", "crashed"]) == {"long"}
    assert await bench.limiter.settle("long", team, 10)
    assert await bench.limiter.renew(team, []) == frozenset()


async def test_more_than_a_minutes_tokens_pass_when_the_bucket_is_full(bench: Bench) -> None:
    team = red(tokens_per_minute=60)
    await bench.admit(team, "small", 1)
    refusal = await bench.admit(team, "huge", 180)
    assert (refusal.refused_by, refusal.retry_after_s) == ("tokens", 1.0)
    await bench.at(1)
    assert (await bench.admit(team, "huge", 180)).is_allowed
    assert (await bench.admit(team, "after", 1)).retry_after_s == 121.0


async def test_a_clock_that_steps_back_refills_nothing_and_goes_on(bench: Bench) -> None:
    team = red(requests_per_minute=60)
    for index in range(60):
        await bench.admit(team, f"r{index}")
    await bench.at(-3600)
    assert not (await bench.admit(team, "in the past")).is_allowed
    await bench.limiter.settle("r0", team, 0)
    await bench.at(-3598)
    assert not (await bench.admit(team, "still before the stored time")).is_allowed
    await bench.at(1)
    assert (await bench.admit(team, "later")).is_allowed
    await bench.at(-3600)
    assert not (await bench.admit(team, "back again")).is_allowed


async def test_a_lowered_limit_holds_at_once(bench: Bench) -> None:
    assert (await bench.admit(red(tokens_per_minute=1000), "r", 10)).is_allowed
    lowered = await bench.admit(red(tokens_per_minute=100), "s", 0)
    assert lowered.tokens == Allowance(100, 100, 0.0)


async def test_a_team_without_limits_is_admitted_and_settled(bench: Bench) -> None:
    answer = await bench.admit(red(), "r", 10**6)
    assert (answer.is_allowed, answer.requests, answer.tokens) == (True, None, None)
    assert await bench.limiter.settle("r", red(), 10)


async def test_teams_do_not_share_and_each_has_one_hash_slot(bench: Bench) -> None:
    await bench.admit(Team("red", limits=Limits(requests_per_minute=1)), "r")
    assert (await bench.admit(Team("blue", limits=Limits(requests_per_minute=1)), "r")).is_allowed
    names = [str(key) for key in await bench.redis.keys("flashray:*")]
    assert len(names) == 6
    assert all("{red}" in name or "{blue}" in name for name in names)


async def test_scripts_are_loaded_again_after_the_server_lost_them(bench: Bench) -> None:
    team = red(requests_per_minute=2)
    await bench.admit(team, "r0")
    await bench.redis.script_flush()
    assert (await bench.admit(team, "r1")).is_allowed
    await bench.redis.script_flush()
    assert await bench.limiter.settle("r1", team, 0)


async def test_a_race_for_the_burst_admits_exactly_the_burst(
    valkey_server: str, bench: Bench
) -> None:
    team = red(requests_per_minute=50)

    async def tries(client: int) -> int:
        async with connect(valkey_server, timeout_s=5.0) as redis:
            limiter = Limiter(redis, clock_lua=CLOCK)
            answers = [await limiter.admit(f"{client}-{n}", team, 0, 0) for n in range(25)]
            return sum(answer.is_allowed for answer in answers)

    assert sum(await asyncio.gather(*map(tries, range(8)))) == 50


async def test_the_servers_own_clock_is_read(valkey: Redis) -> None:
    seconds, _ = await valkey.time()
    admission = await Limiter(valkey).admit("r", red(requests_per_minute=1), 0, 0)
    assert 0 <= admission.unix_s - seconds < 60


async def test_a_dead_store_is_one_kind_of_error() -> None:
    async with connect("unix:///nowhere/socket", timeout_s=0.05) as redis:
        limiter = Limiter(redis)
        with pytest.raises(LimiterUnavailable, match="ConnectionError") as caught:
            await limiter.admit("r", red(), 0, 0)
        with pytest.raises(LimiterUnavailable):
            await limiter.settle("r", red(), 0)
        with pytest.raises(LimiterUnavailable):
            await limiter.renew(red(), ["r"])
    assert isinstance(caught.value, BackendUnavailable)
    assert caught.value.status == 503
    assert caught.value.__cause__ is not None


def test_the_estimate_of_an_answer_is_capped() -> None:
    assert (est_output_tokens(100), est_output_tokens(64_000)) == (100, 4096)
    assert est_output_tokens(64_000, cap=8192) == 8192


async def test_a_peek_takes_nothing_and_sees_what_is_left(valkey: Redis) -> None:
    team = Team("peek", limits=Limits(requests_per_minute=10, tokens_per_minute=1000))
    limiter = Limiter(valkey)
    fresh = await limiter.peek(team)
    await limiter.admit("a", team, 100, 200)
    for _ in range(3):
        left = await limiter.peek(team)
    assert (fresh.requests.remaining, fresh.tokens.remaining) == (10, 1000)
    assert left.requests.remaining == 9
    assert 700 <= left.tokens.remaining < 720
