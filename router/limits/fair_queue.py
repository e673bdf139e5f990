"""Who runs next in this replica: start-time fair queuing over the teams that wait, in tokens."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from router.errors import Overloaded
from router.teams import Team

MAX_RETRY_AFTER_S = 30.0


@dataclass(eq=False, slots=True)
class _Waiter:
    team: Team
    cost: float  # tokens over the team's weight
    arrival: float  # in virtual time
    order: int
    turn: asyncio.Future[None]

    @property
    def is_granted(self) -> bool:
        return self.turn.done() and not self.turn.cancelled()


@dataclass(eq=False, slots=True)
class _Line:
    """One team. `finish` is the virtual time up to which it has been served."""

    waiting: deque[_Waiter] = field(default_factory=deque)
    num_running: int = 0
    finish: float = 0.0

    @property
    def may_run(self) -> bool:
        if not self.waiting:
            return False
        max_running = self.waiting[0].team.limits.max_concurrent_requests
        return max_running is None or self.num_running < max_running

    @property
    def due(self) -> tuple[float, int]:
        """The virtual start of its head: what it was served before, but no credit for idling."""
        head = self.waiting[0]
        return max(self.finish, head.arrival), head.order


class FairQueue:
    """At most `max_running` requests run at once. Teams that wait get tokens in proportion to their
    weights, whatever the size of their requests; within a team, first come is first served. A team
    earns no credit while it asks for nothing."""

    def __init__(self, max_running: int, clock: Callable[[], float] = time.monotonic) -> None:
        if max_running < 1:
            raise ValueError(f"max_running: expected at least 1, got {max_running}")
        self._max_running = max_running
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._order = itertools.count()
        self._num_running = 0
        self._virtual_time = 0.0
        self._mean_run_s = 1.0

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    @asynccontextmanager
    async def slot(self, team: Team, num_tokens: int) -> AsyncGenerator[None, None]:
        """Hold a place among the running requests, waiting for it in the team's line. `num_tokens`
        is what the request may cost. Raises Overloaded when the line is full."""
        await self._enter(team, num_tokens)
        started_s = self._clock()
        try:
            yield
        finally:
            self._mean_run_s += 0.1 * (self._clock() - started_s - self._mean_run_s)
            self._leave(self._lines[team.name])

    async def _enter(self, team: Team, num_tokens: int) -> None:
        line = self._lines.setdefault(team.name, _Line())
        turn = asyncio.get_running_loop().create_future()
        cost = max(1, num_tokens) / team.limits.weight
        waiter = _Waiter(team, cost, self._virtual_time, next(self._order), turn)
        line.waiting.append(waiter)
        self._start_due()
        if not turn.done() and len(line.waiting) > team.limits.max_queued:
            line.waiting.remove(waiter)
            raise self._overloaded(team)
        try:
            await turn
        except asyncio.CancelledError:
            self._forget(line, waiter)
            raise

    def _start_due(self) -> None:
        while self._num_running < self._max_running:
            ready = [line for line in self._lines.values() if line.may_run]
            if not ready:
                return
            line = min(ready, key=lambda each: each.due)
            start, _ = line.due
            waiter = line.waiting.popleft()
            if waiter.turn.cancelled():  # its task has not run yet to say so
                continue
            self._virtual_time = max(self._virtual_time, start)
            line.finish = start + waiter.cost
            line.num_running += 1
            self._num_running += 1
            waiter.turn.set_result(None)

    def _leave(self, line: _Line) -> None:
        if not line.may_run:  # held back by its own limit: no credit for that either
            line.finish = max(line.finish, self._virtual_time)
        line.num_running -= 1
        self._num_running -= 1
        self._start_due()

    def _forget(self, line: _Line, waiter: _Waiter) -> None:
        """Undo a cancelled wait, also one whose turn came in the same instant."""
        if waiter.is_granted:
            line.finish -= waiter.cost
            self._leave(line)
        elif waiter in line.waiting:
            line.waiting.remove(waiter)

    def _overloaded(self, team: Team) -> Overloaded:
        """The wait is a guess: what waits, at the mean pace of the runs so far."""
        wait_s = self.num_waiting * self._mean_run_s / self._max_running
        return Overloaded(
            f"team {team.name}: {team.limits.max_queued} requests wait already, retry later",
            retry_after_s=min(MAX_RETRY_AFTER_S, max(1.0, wait_s)),
        )
