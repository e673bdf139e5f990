"""The limiter's scripts equal a small model under any order of admit, settle, crash, renewal, lease
expiry and steps of the clock, forwards and backwards."""

import asyncio
import itertools
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis

from router.limits.limiter import Limiter
from router.limits.policy import Limits
from router.teams import Team

LEASE_MS = 10_000
MINUTE_MS = 60_000
REQUEST_IDS = st.sampled_from("abcdef")


class Model:
    """What the limiter promises, in exact integers: levels in 1/60000 of a token."""

    def __init__(self, rpm: int, tpm: int, max_concurrent: int) -> None:
        self.rates, self.max_concurrent = (rpm, tpm), max_concurrent
        self.levels = [rate * MINUTE_MS for rate in self.rates]
        self.written_ms: list[int | None] = [None, None]
        self.leases: dict[str, tuple[int, int]] = {}  # id -> (expiry, tokens)

    def expire(self, now: int) -> None:
        self.leases = {id_: lease for id_, lease in self.leases.items() if lease[0] > now}

    def level(self, bucket: int, now: int) -> int:
        since, rate = self.written_ms[bucket], self.rates[bucket]
        gained = 0 if since is None else max(0, now - since) * rate
        return min(rate * MINUTE_MS, self.levels[bucket] + gained)

    def take(self, bucket: int, num_tokens: int, now: int) -> None:
        level = self.level(bucket, now) - num_tokens * MINUTE_MS
        self.levels[bucket] = min(level, self.rates[bucket] * MINUTE_MS)
        self.written_ms[bucket] = now

    def admit(self, id_: str, num_tokens: int, now: int) -> bool:
        self.expire(now)
        if id_ in self.leases:
            return True
        costs = (1, num_tokens)
        covered = all(
            self.level(bucket, now) >= min(cost, self.rates[bucket]) * MINUTE_MS
            for bucket, cost in enumerate(costs)
        )
        if not covered or len(self.leases) >= self.max_concurrent:
            return False
        for bucket, cost in enumerate(costs):
            self.take(bucket, cost, now)
        self.leases[id_] = (now + LEASE_MS, num_tokens)
        return True

    def settle(self, id_: str, num_tokens_used: int, now: int) -> bool:
        self.expire(now)
        if id_ not in self.leases:
            return False
        self.take(1, num_tokens_used - self.leases.pop(id_)[1], now)
        return True

    def renew(self, ids: set[str], now: int) -> set[str]:
        self.expire(now)
        renewed = ids & self.leases.keys()
        self.leases |= {id_: (now + LEASE_MS, self.leases[id_][1]) for id_ in renewed}
        return renewed


class Store:
    """One client on one loop for every example; an example has a team, and so keys, of its own."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.redis = Redis.from_url(url)
        self.names = itertools.count()

    def run(self, awaitable: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(awaitable)


@pytest.fixture
def store(valkey_server: str) -> Iterator[Store]:
    store = Store(valkey_server)
    store.run(store.redis.flushdb())
    yield store
    store.run(store.redis.aclose())
    store.loop.close()


class LimiterMachine(RuleBasedStateMachine):
    """A crash is an admitted request that nobody settles: the rules leave most of them so."""

    store: Store

    @initialize(
        rpm=st.sampled_from([3, 7, 60]),
        tpm=st.sampled_from([10, 97, 1_000_003]),
        max_concurrent=st.integers(1, 4),
        now=st.integers(MINUTE_MS, 2 * MINUTE_MS),
    )
    def start(self, rpm: int, tpm: int, max_concurrent: int, now: int) -> None:
        name = f"team-{next(self.store.names)}"
        limits = Limits(rpm, tpm, max_concurrent)
        self.team = Team(name, limits=limits)
        self.model = Model(rpm, tpm, max_concurrent)
        self.clock = f"clock:{{{name}}}"
        clock_lua = (
            "local function now_ms() return tonumber(redis.call('GET', "
            "'clock:' .. string.match(KEYS[1], '{.-}'))) end"
        )
        self.limiter = Limiter(self.store.redis, lease_s=LEASE_MS / 1e3, clock_lua=clock_lua)
        self.set_clock(now)

    def set_clock(self, now: int) -> None:
        self.now = now
        self.store.run(self.store.redis.set(self.clock, now))

    @rule(
        step_ms=st.one_of(
            st.integers(-20_000, 70_000),
            st.sampled_from([1, LEASE_MS - 1, LEASE_MS, LEASE_MS + 1, MINUTE_MS, -1, -30_000]),
        )
    )
    def step_clock(self, step_ms: int) -> None:
        self.set_clock(max(0, self.now + step_ms))

    @rule(id_=REQUEST_IDS, share=st.sampled_from([0, 0.01, 0.3, 0.5, 1, 1.5, 3]))
    def admit(self, id_: str, share: float) -> None:
        tpm = self.model.rates[1]
        num_tokens = round(share * tpm)
        admission = self.store.run(self.limiter.admit(id_, self.team, num_tokens, 0))
        is_repeated = id_ in self.model.leases and self.model.leases[id_][0] > self.now
        assert admission.is_allowed == self.model.admit(id_, num_tokens, self.now)
        if is_repeated:
            return
        levels = [self.model.level(bucket, self.now) for bucket in (0, 1)]
        for allowance, level in zip((admission.requests, admission.tokens), levels, strict=True):
            assert allowance.remaining == max(0, level // MINUTE_MS)
        if admission.refused_by in ("requests", "tokens"):
            bucket, cost = (0, 1) if admission.refused_by == "requests" else (1, num_tokens)
            rate, wait_ms = self.model.rates[bucket], round(admission.retry_after_s * 1e3)
            needed = min(cost, rate) * MINUTE_MS
            assert levels[bucket] + wait_ms * rate >= needed
            assert levels[bucket] + (wait_ms - 1) * rate < needed

    @rule(id_=REQUEST_IDS, share=st.sampled_from([0, 0.2, 0.5, 1, 2]))
    def settle(self, id_: str, share: float) -> None:
        num_tokens_used = round(share * self.model.rates[1])
        settled = self.store.run(self.limiter.settle(id_, self.team, num_tokens_used))
        assert settled == self.model.settle(id_, num_tokens_used, self.now)

    @rule(ids=st.sets(REQUEST_IDS, min_size=1, max_size=3))
    def renew(self, ids: set[str]) -> None:
        renewed = self.store.run(self.limiter.renew(self.team, ids))
        assert renewed == self.model.renew(ids, self.now)

    def teardown(self) -> None:
        """What is stored is what the model holds, to the last unit, and nothing leaks."""
        if hasattr(self, "model"):
            self.store.run(self.check_stored())

    async def check_stored(self) -> None:
        stored, leases, reservations = (
            f"flashray:{{{self.team.name}}}:{part}"
            for part in ("buckets", "leases", "reservations")
        )
        levels = await self.store.redis.hmget(stored, "requests", "tokens")
        for bucket, level in enumerate(levels):
            expected = (
                self.model.levels[bucket] if self.model.written_ms[bucket] is not None else None
            )
            assert (None if level is None else int(level)) == expected
        ids = {id_.encode() for id_ in self.model.leases}
        assert set(await self.store.redis.zrange(leases, 0, -1)) == ids
        assert set(await self.store.redis.hkeys(reservations)) == ids


def test_limiter_equals_the_model(store: Store) -> None:
    LimiterMachine.store = store
    run_state_machine_as_test(
        LimiterMachine,
        settings=settings(
            max_examples=2_000,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
