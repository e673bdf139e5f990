"""What a team may use, and the answer to one request for it. Pure: no clock and no store."""

from dataclasses import dataclass
from typing import Literal

Dimension = Literal["requests", "tokens", "concurrency"]

UNITS_PER_TOKEN = 60_000
"""Bucket levels are whole numbers of 1/60000 of a request or token, so that a refill of
`elapsed_ms * per_minute` is exact."""

MAX_EST_OUTPUT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """None is no limit. A bucket refills all the time and holds one minute's allowance.
    `weight` is the share of a replica's tokens among the teams that wait for it."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    max_queued: int = 64
    weight: float = 1.0


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Allowance:
    """One bucket as its caller sees it; `reset_s` is the time until it is full again."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """`level` in 1/60000 of a request or token; negative is a debt."""

    per_minute: int
    level: int

    @classmethod
    def full(cls, per_minute: int) -> "Bucket":
        return cls(per_minute, per_minute * UNITS_PER_TOKEN)

    def covers(self, cost: int) -> bool:
        """More than a full bucket holds is covered by a full one, and leaves a debt."""
        return self.level >= min(cost, self.per_minute) * UNITS_PER_TOKEN

    def wait_s(self, cost: int) -> float:
        """Until it covers `cost`, rounded up to a millisecond."""
        missing = min(cost, self.per_minute) * UNITS_PER_TOKEN - self.level
        return max(0, -(-missing // self.per_minute)) / 1e3

    def refilled(self, elapsed_ms: int) -> "Bucket":
        return self._at(self.level + max(0, elapsed_ms) * self.per_minute)

    def plus(self, num_tokens: int) -> "Bucket":
        return self._at(self.level + num_tokens * UNITS_PER_TOKEN)

    def allowance(self) -> Allowance:
        return Allowance(
            limit=self.per_minute,
            remaining=max(0, self.level // UNITS_PER_TOKEN),
            reset_s=self.wait_s(self.per_minute),
        )

    def _at(self, level: int) -> "Bucket":
        return Bucket(self.per_minute, min(level, self.per_minute * UNITS_PER_TOKEN))


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to one request, at `unix_s` of the limiter's clock. A refusal names the dimension
    that takes longest and the wait after which it can pass; then nothing was taken."""

    unix_s: float
    requests: Allowance | None = None
    tokens: Allowance | None = None
    refused_by: Dimension | None = None
    retry_after_s: float | None = None

    @property
    def is_allowed(self) -> bool:
        return self.refused_by is None


def admission_of(
    unix_s: float,
    requests: Bucket | None,
    tokens: Bucket | None,
    refusal: tuple[Dimension, float] | None = None,
) -> Admission:
    """The answer that leaves the buckets so; None is no limit."""
    refused_by, retry_after_s = refusal or (None, None)
    return Admission(
        unix_s=unix_s,
        requests=requests.allowance() if requests else None,
        tokens=tokens.allowance() if tokens else None,
        refused_by=refused_by,
        retry_after_s=retry_after_s,
    )


def longest_wait(
    requests: Bucket | None, tokens: Bucket | None, num_tokens: int
) -> tuple[Dimension, float]:
    """Why a request of `num_tokens` does not pass, and for how long."""
    requests_wait_s = requests.wait_s(1) if requests else 0.0
    tokens_wait_s = tokens.wait_s(num_tokens) if tokens else 0.0
    if requests_wait_s >= tokens_wait_s:
        return "requests", requests_wait_s
    return "tokens", tokens_wait_s


def est_output_tokens(max_tokens: int, cap: int = MAX_EST_OUTPUT_TOKENS) -> int:
    """What to reserve for an answer: clients ask for far more than models write, and a reservation
    of all of it would starve their team."""
    return min(max_tokens, cap)
