"""The limits of a team over all router replicas: one atomic script admits a request, another
settles it. Redis holds the state and the clock."""

import math
import random
from collections.abc import Collection, Sequence
from importlib.resources import files
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from router.errors import LimiterUnavailable
from router.limits.policy import Admission, Bucket, Dimension, Limits, admission_of, longest_wait
from router.teams import Team

LEASE_S = 60.0


class TeamLimiter(Protocol):
    """What the pipeline asks; all of it is idempotent."""

    async def admit(
        self, request_id: str, team: Team, num_input_tokens: int, est_output_tokens: int
    ) -> Admission: ...

    async def settle(self, request_id: str, team: Team, num_tokens_used: int) -> bool: ...

    async def renew(self, team: Team, request_ids: Collection[str]) -> frozenset[str]: ...


def connect(url: str, timeout_s: float) -> "Redis":
    """A client that gives up soon: a limiter must not hold requests for longer than a decision is
    worth. One retry covers a pooled connection that the server closed."""
    client: Redis = Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), retries=1),
    )
    return client


class Limiter:
    """An admitted request holds a lease of `lease_s`: settle it, renew it, or lose it; a lease that
    ran out counts as used in full. `clock_lua` is for tests: it defines `now_ms()`.

    Every method raises LimiterUnavailable when Redis does not answer."""

    def __init__(
        self, redis: "Redis", *, lease_s: float = LEASE_S, clock_lua: str | None = None
    ) -> None:
        clock = _source("clock") if clock_lua is None else clock_lua
        self._lease_ms = math.ceil(lease_s * 1e3)
        self._admit, self._settle, self._renew, self._charge, self._peek = (
            redis.register_script("\n".join((clock, _source("team"), _source(name))))
            for name in ("admit", "settle", "renew", "charge", "peek")
        )

    async def admit(
        self, request_id: str, team: Team, num_input_tokens: int, est_output_tokens: int
    ) -> Admission:
        """Reserve one request and its tokens, or nothing. The id of a request that still holds its
        lease gets its first answer again. More tokens than a minute's allowance pass only when the
        bucket is full, and leave it in debt."""
        num_tokens = num_input_tokens + est_output_tokens
        limits = team.limits
        arguments = (
            request_id,
            self._lease_ms,
            num_tokens,
            _argument(limits.requests_per_minute),
            _argument(limits.tokens_per_minute),
            _argument(limits.max_concurrent_requests),
        )
        return _admission(_text(await _run(self._admit, team, arguments)), limits, num_tokens)

    async def settle(self, request_id: str, team: Team, num_tokens_used: int) -> bool:
        """Give back what was reserved and not used, or take what was used beyond it. False when
        there was no lease left: settled before, run out, or never admitted."""
        arguments = (request_id, num_tokens_used, _argument(team.limits.tokens_per_minute))
        return bool(await _run(self._settle, team, arguments))

    async def renew(self, team: Team, request_ids: Collection[str]) -> frozenset[str]:
        """Start the leases anew; returns the ids that still held one."""
        if not request_ids:
            return frozenset()
        renewed = await _run(self._renew, team, (self._lease_ms, *request_ids))
        return frozenset(map(_text, renewed))

    async def charge(self, team: Team, num_requests: int, num_tokens: int) -> None:
        """Take what was used while nobody could ask; negative tokens come back. Not idempotent."""
        limits = team.limits
        arguments = (
            num_requests,
            num_tokens,
            _argument(limits.requests_per_minute),
            _argument(limits.tokens_per_minute),
        )
        await _run(self._charge, team, arguments)

    async def peek(self, team: Team) -> Admission:
        """What the team has left now; takes nothing."""
        limits = team.limits
        arguments = (_argument(limits.requests_per_minute), _argument(limits.tokens_per_minute))
        return _admission(_text(await _run(self._peek, team, arguments)), limits, 0)


def _source(name: str) -> str:
    return (files("router.limits") / "lua" / f"{name}.lua").read_text()


async def _run(script: AsyncScript, team: Team, arguments: Sequence[str | int]) -> Any:
    """EVALSHA, loading the script where the server does not know it."""
    # The hash tag keeps a team's keys on one shard of a cluster.
    keys = [f"flashray:{{{team.name}}}:{part}" for part in ("buckets", "leases", "reservations")]
    try:
        return await script(keys=keys, args=arguments)
    except RedisError as exc:
        raise LimiterUnavailable(
            f"the store of the limits does not answer ({type(exc).__name__}): retry",
            retry_after_s=1.0,
        ) from exc


def _argument(limit: int | None) -> str | int:
    return "" if limit is None else limit


def _text(answer: bytes | str) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


def _admission(answer: str, limits: Limits, num_tokens: int) -> Admission:
    verdict, now_ms, requests_level, tokens_level = answer.split()
    requests = _bucket(limits.requests_per_minute, requests_level)
    tokens = _bucket(limits.tokens_per_minute, tokens_level)
    refusal: tuple[Dimension, float] | None = None
    if verdict == "rate":
        refusal = longest_wait(requests, tokens, num_tokens)
    elif verdict == "concurrency":
        # Nobody knows when a lease ends; spread the retries.
        refusal = "concurrency", random.uniform(0.25, 1.0)
    return admission_of(int(now_ms) / 1e3, requests, tokens, refusal)


def _bucket(per_minute: int | None, level: str) -> Bucket | None:
    """None also for a request that was first admitted before the team had this limit."""
    return None if per_minute is None or level == "-" else Bucket(per_minute, int(level))
