"""A replica's share of its teams' limits, for as long as the shared ones cannot be asked."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from router.limits.policy import (
    UNITS_PER_TOKEN,
    Admission,
    Allowance,
    Bucket,
    admission_of,
    longest_wait,
)
from router.teams import Team


@dataclass(slots=True)
class _Share:
    """What one team may still use here, as of `refilled_s`."""

    requests: Bucket | None
    tokens: Bucket | None
    refilled_s: float

    def refill(self, now_s: float) -> None:
        elapsed_ms = int((now_s - self.refilled_s) * 1e3)
        self.refilled_s += elapsed_ms / 1e3
        self.requests = self.requests and self.requests.refilled(elapsed_ms)
        self.tokens = self.tokens and self.tokens.refilled(elapsed_ms)


@dataclass(slots=True)
class Usage:
    """What was let through here and the shared limits do not know of."""

    num_requests: int = 0
    num_tokens: int = 0


class LocalBuckets:
    """The limits over the number of replicas, from the levels that were last seen: together the
    replicas admit about what the shared limits would have. Concurrency is left to the queue."""

    def __init__(self, num_replicas: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_replicas = num_replicas
        self._clock = clock
        self._seen: dict[str, tuple[Admission, float]] = {}
        self._shares: dict[str, _Share] = {}
        self._reserved: dict[str, int] = {}
        self._usages: dict[str, Usage] = {}

    def saw(self, team: Team, admission: Admission) -> None:
        """The shared limits answered: the next outage starts from here."""
        self._seen[team.name] = admission, self._clock()
        self._shares.pop(team.name, None)

    def admit(self, request_id: str, team: Team, num_tokens: int) -> Admission:
        share = self._shares.get(team.name)
        if share is None:
            share = self._shares[team.name] = self._share(team)
        share.refill(self._clock())
        is_repeated = request_id in self._reserved
        requests, tokens = share.requests, share.tokens
        if not is_repeated:
            if (requests and not requests.covers(1)) or (tokens and not tokens.covers(num_tokens)):
                refusal = longest_wait(requests, tokens, num_tokens)
                return admission_of(time.time(), requests, tokens, refusal)
            share.requests = requests and requests.plus(-1)
            share.tokens = tokens and tokens.plus(-num_tokens)
            self._reserved[request_id] = num_tokens
            self._count(team, 1, num_tokens)
        return admission_of(time.time(), share.requests, share.tokens)

    def settle(self, request_id: str, team: Team, num_tokens_used: int) -> bool:
        """False for a request that was not admitted here."""
        num_reserved = self._reserved.pop(request_id, None)
        if num_reserved is None:
            return False
        num_unused = num_reserved - num_tokens_used
        self._count(team, 0, -num_unused)
        if share := self._shares.get(team.name):
            share.tokens = share.tokens and share.tokens.plus(num_unused)
        return True

    def take_usage(self, team: Team) -> Usage | None:
        """Hand over what is to be charged to the shared limits."""
        return self._usages.pop(team.name, None)

    def put_back(self, team: Team, usage: Usage) -> None:
        self._count(team, usage.num_requests, usage.num_tokens)

    def _count(self, team: Team, num_requests: int, num_tokens: int) -> None:
        usage = self._usages.setdefault(team.name, Usage())
        usage.num_requests += num_requests
        usage.num_tokens += num_tokens

    def _share(self, team: Team) -> _Share:
        now_s = self._clock()
        admission, seen_s = self._seen.get(team.name, (Admission(unix_s=0.0), now_s))
        elapsed_ms = int((now_s - seen_s) * 1e3)
        limits = team.limits
        return _Share(
            self._bucket(limits.requests_per_minute, admission.requests, elapsed_ms),
            self._bucket(limits.tokens_per_minute, admission.tokens, elapsed_ms),
            now_s,
        )

    def _bucket(
        self, per_minute: int | None, seen: Allowance | None, elapsed_ms: int
    ) -> Bucket | None:
        if per_minute is None:
            return None
        whole = Bucket.full(per_minute)
        if seen is not None:
            whole = Bucket(per_minute, seen.remaining * UNITS_PER_TOKEN).refilled(elapsed_ms)
        # At least one a minute: a share of nothing would shut the team out.
        return Bucket(max(1, per_minute // self._num_replicas), whole.level // self._num_replicas)
