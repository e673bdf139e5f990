"""Which target is asked next, after what the one before it said."""

import asyncio
from collections import deque
from collections.abc import Iterable

from router.backends.pool import BackendPool
from router.errors import (
    BackendError,
    BackendUnavailable,
    Overloaded,
    RateLimited,
    RouterError,
)
from router.routes import LOCAL, Target

MAX_UPSTREAM_ATTEMPTS = 2
MAX_WAIT_S = 2.0

# What another target may mend; all else is the client's to mend.
MENDABLE = (BackendError, Overloaded, RateLimited)


class Attempts:
    """At most MAX_UPSTREAM_ATTEMPTS requests go to upstreams for one of a client's: a failure must
    not become a storm. A busy upstream that asks for a short wait gets it, once."""

    def __init__(self, targets: Iterable[Target], pool: BackendPool) -> None:
        self._waiting = deque(targets)
        self._pool = pool
        self._last: Target | None = None
        self._failure: RouterError | None = None
        self._has_waited = False
        self.num_upstream = 0

    @property
    def is_first(self) -> bool:
        """No target has failed yet."""
        return self._failure is None

    def failed(self, failure: RouterError) -> None:
        """The last target failed before its first content. When a fallback cannot take the request
        at all, that is not the client's fault: it hears of the failure before."""
        if self._failure is not None and not isinstance(failure, MENDABLE):
            self._last = None
        else:
            self._failure = failure

    async def next_target(self) -> Target:
        """Raises the failure when nothing is left to ask."""
        if self._last is not None and await self._can_wait_for(self._last):
            self.num_upstream += 1
            return self._last
        while self._waiting:
            target = self._waiting.popleft()
            if self._can_ask(target):
                is_local = target.backend == LOCAL
                self.num_upstream += not is_local
                self._last = None if is_local else target
                if self._failure is not None:
                    self._pool.fallbacks.inc()
                return target
        assert self._failure is not None, "a route has targets"
        raise self._failure

    def _can_ask(self, target: Target) -> bool:
        if target.backend == LOCAL:
            return True
        if self.num_upstream == MAX_UPSTREAM_ATTEMPTS:
            return False
        if self._pool.breakers[target.backend].admit():
            return True
        self._failure = self._failure or BackendUnavailable(
            f"{target.backend}: failed several times in a row and rests", retry_after_s=5
        )
        return False

    async def _can_wait_for(self, target: Target) -> bool:
        """True after the wait."""
        failure = self._failure
        if not isinstance(failure, RateLimited | Overloaded) or failure.retry_after_s is None:
            return False
        is_short = failure.retry_after_s <= MAX_WAIT_S
        if self._has_waited or not is_short or self.num_upstream == MAX_UPSTREAM_ATTEMPTS:
            return False
        self._has_waited = True
        await asyncio.sleep(failure.retry_after_s)
        return self._pool.breakers[target.backend].admit()
