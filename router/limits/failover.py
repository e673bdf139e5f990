"""The limits while Redis comes and goes: shared ones when it answers, this replica's share when it
does not, and what passed meanwhile is charged when it is back."""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection

from router.errors import LimiterUnavailable
from router.limits.limiter import Limiter
from router.limits.local_buckets import LocalBuckets
from router.limits.policy import Admission
from router.teams import Team

logger = logging.getLogger(__name__)

MAX_UNSETTLED = 10_000
MAX_REPLAYED = 32  # by one admission, which waits for them


class FailoverLimiter:
    """A TeamLimiter that never raises LimiterUnavailable. After a failure Redis is left alone for
    `retry_s`, so that an outage costs no request more than one timeout."""

    def __init__(
        self,
        limiter: Limiter,
        num_replicas: int,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = 1.0,
    ) -> None:
        self._limiter = limiter
        self._local = LocalBuckets(num_replicas, clock)
        self._clock = clock
        self._retry_s = retry_s
        self._closed_until_s = -1.0
        # Beyond its end the oldest are left to their leases: those count as used in full.
        self._unsettled: deque[tuple[str, Team, int]] = deque(maxlen=MAX_UNSETTLED)

    @property
    def is_shared(self) -> bool:
        """Whether Redis is asked; False right after it failed."""
        return self._clock() >= self._closed_until_s

    async def admit(
        self, request_id: str, team: Team, num_input_tokens: int, est_output_tokens: int
    ) -> Admission:
        if self.is_shared:
            try:
                await self._charge(team)
                admission = await self._limiter.admit(
                    request_id, team, num_input_tokens, est_output_tokens
                )
            except LimiterUnavailable as exc:
                self._failed(exc)
                # The question may have arrived all the same: nothing is used under its lease.
                self._unsettled.append((request_id, team, 0))
            else:
                self._local.saw(team, admission)
                await self._settle_rest()
                return admission
        return self._local.admit(request_id, team, num_input_tokens + est_output_tokens)

    async def settle(self, request_id: str, team: Team, num_tokens_used: int) -> bool:
        if self._local.settle(request_id, team, num_tokens_used):
            return True
        if self.is_shared:
            try:
                return await self._limiter.settle(request_id, team, num_tokens_used)
            except LimiterUnavailable as exc:
                self._failed(exc)
        self._unsettled.append((request_id, team, num_tokens_used))
        return True

    async def renew(self, team: Team, request_ids: Collection[str]) -> frozenset[str]:
        """While Redis does not answer, every lease counts as held."""
        if self.is_shared:
            try:
                return await self._limiter.renew(team, request_ids)
            except LimiterUnavailable as exc:
                self._failed(exc)
        return frozenset(request_ids)

    async def _charge(self, team: Team) -> None:
        usage = self._local.take_usage(team)
        if usage is None:
            return
        try:
            await self._limiter.charge(team, usage.num_requests, usage.num_tokens)
        except BaseException:
            # It may have arrived: charging twice is the safe side.
            self._local.put_back(team, usage)
            raise

    async def _settle_rest(self) -> None:
        for _ in range(min(len(self._unsettled), MAX_REPLAYED)):
            if not self._unsettled:
                return
            unsettled = self._unsettled.popleft()
            try:
                await self._limiter.settle(*unsettled)
            except LimiterUnavailable as exc:
                self._unsettled.appendleft(unsettled)
                self._failed(exc)
                return

    def _failed(self, error: LimiterUnavailable) -> None:
        if self.is_shared:
            logger.warning("limits fall back to this replica's share error=%s", error.message)
        self._closed_until_s = self._clock() + self._retry_s
