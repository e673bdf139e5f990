"""The queue over hand-driven tasks: nothing waits for real time."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import Overloaded
from router.limits.fair_queue import FairQueue
from router.limits.policy import Limits
from router.teams import Team

RED, BLUE = Team("red"), Team("blue")
SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=15)


class Clients:
    """Requests that run until they are told to finish."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.served: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.finish: dict[str, asyncio.Event] = {}

    async def ask(self, name: str, team: Team, num_tokens: int = 1) -> None:
        self.finish[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, team, num_tokens))
        await settle()

    async def _run(self, name: str, team: Team, num_tokens: int) -> None:
        async with self.queue.slot(team, num_tokens):
            self.served.append(name)
            await self.finish[name].wait()

    async def end(self, name: str) -> None:
        self.finish[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()

    async def drain(self) -> None:
        """End what runs, one after another in order of service, until nothing is left."""
        index = 0
        while index < len(self.served):
            await self.end(self.served[index])
            index += 1
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert (self.queue.num_running, self.queue.num_waiting) == (0, 0)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_runs_at_most_max_running_at_once() -> None:
    clients = Clients(FairQueue(2))
    for name in "abc":
        await clients.ask(name, RED)
    assert clients.served == ["a", "b"]
    assert (clients.queue.num_running, clients.queue.num_waiting) == (2, 1)
    await clients.end("b")
    assert clients.served == ["a", "b", "c"]
    await clients.drain()


async def test_a_team_is_served_in_order() -> None:
    clients = Clients(FairQueue(1))
    for index, num_tokens in enumerate([9, 1, 5, 1]):
        await clients.ask(f"r{index}", RED, num_tokens)
    await clients.drain()
    assert clients.served == ["r0", "r1", "r2", "r3"]


async def test_a_newcomer_does_not_wait_behind_a_long_line() -> None:
    clients = Clients(FairQueue(1))
    for index in range(10):
        await clients.ask(f"r{index}", RED, 100)
    await clients.ask("b0", BLUE, 100)
    await clients.drain()
    assert clients.served.index("b0") <= 2


async def test_idling_earns_no_credit() -> None:
    clients = Clients(FairQueue(1))
    for index in range(5):
        await clients.ask(f"early{index}", RED, 100)
        await clients.end(f"early{index}")
    await clients.ask("r0", RED, 100)
    for index in range(1, 4):
        await clients.ask(f"r{index}", RED, 100)
        await clients.ask(f"b{index}", BLUE, 100)
    await clients.drain()
    assert clients.served[5:] == ["r0", "b1", "r1", "b2", "r2", "b3", "r3"]


async def test_weights_share_the_tokens() -> None:
    heavy = Team("heavy", limits=Limits(weight=3))
    clients = Clients(FairQueue(1))
    await clients.ask("first", BLUE, 1)
    for index in range(20):
        await clients.ask(f"h{index}", heavy, 90)
        await clients.ask(f"b{index}", BLUE, 90)
    await clients.drain()
    assert sum(name.startswith("h") for name in clients.served[1:21]) == 15


async def test_a_full_line_is_overloaded_with_a_time_to_come_back() -> None:
    now_s = 0.0
    clients = Clients(FairQueue(1, clock=lambda: now_s))
    small = Team("small", limits=Limits(max_queued=2))
    await clients.ask("slow", small)
    now_s = 41.0  # the mean of runs moves from 1 s to 5 s
    await clients.end("slow")
    for name in ("running", "w0", "w1", "refused"):
        await clients.ask(name, small)
    with pytest.raises(Overloaded, match="team small: 2 requests wait already") as caught:
        await clients.tasks["refused"]
    assert caught.value.status == 529
    assert caught.value.retry_after_s == pytest.approx(10.0)
    await clients.ask("other", BLUE)
    assert clients.queue.num_waiting == 3
    await clients.drain()
    assert "refused" not in clients.served


async def test_no_queue_still_runs_what_fits() -> None:
    unqueued = Team("unqueued", limits=Limits(max_queued=0))
    clients = Clients(FairQueue(1))
    await clients.ask("a", unqueued)
    await clients.ask("b", unqueued)
    with pytest.raises(Overloaded):
        await clients.tasks["b"]
    assert clients.served == ["a"]
    await clients.drain()


async def test_a_team_at_its_own_limit_lets_others_pass() -> None:
    capped = Team("capped", limits=Limits(max_concurrent_requests=1))
    clients = Clients(FairQueue(3))
    for index in range(3):
        await clients.ask(f"c{index}", capped)
    await clients.ask("b", BLUE)
    assert clients.served == ["c0", "b"]
    await clients.end("c0")
    assert clients.served == ["c0", "b", "c1"]
    await clients.drain()
    assert clients.served[-1] == "c2"


async def test_a_failing_request_frees_its_place() -> None:
    queue = FairQueue(1)
    with pytest.raises(ZeroDivisionError):
        async with queue.slot(RED, 1):
            raise ZeroDivisionError
    async with asyncio.timeout(1), queue.slot(RED, 1):
        assert queue.num_running == 1


async def test_a_waiter_cancelled_in_the_instant_of_its_turn_frees_it() -> None:
    clients = Clients(FairQueue(1))
    for name in ("a", "b", "c"):
        await clients.ask(name, RED, 10)
    clients.finish["a"].set()
    await asyncio.sleep(0)  # a leaves and grants b, whose task has not run yet
    clients.tasks["b"].cancel()
    await settle()
    assert clients.served == ["a", "c"]
    await clients.drain()


async def test_a_turn_is_not_given_to_a_waiter_just_cancelled() -> None:
    clients = Clients(FairQueue(1))
    for name in ("a", "b", "c"):
        await clients.ask(name, RED, 10)
    clients.finish["a"].set()
    clients.tasks["b"].cancel()
    await settle()
    assert clients.served == ["a", "c"]
    await clients.drain()


def test_room_for_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_running: expected at least 1, got 0"):
        FairQueue(0)


async def serve(arrivals: list[tuple[Team, int]], max_running: int = 1) -> list[tuple[str, int]]:
    """Everything arrives while one request of a third team runs; returns the order of service."""
    queue, order = FairQueue(max_running), list[tuple[str, int]]()
    done = asyncio.Event()

    async def block() -> None:
        async with queue.slot(Team("third"), 1):
            await done.wait()

    async def ask(team: Team, num_tokens: int) -> None:
        async with queue.slot(team, num_tokens):
            order.append((team.name, num_tokens))
            await asyncio.sleep(0)

    blockers = [asyncio.create_task(block()) for _ in range(max_running)]
    await settle()
    tasks = [asyncio.create_task(ask(*arrival)) for arrival in arrivals]
    await settle()
    assert order == []
    done.set()
    await asyncio.gather(*blockers, *tasks)
    return order


@given(SIZES, SIZES, st.sampled_from([1.0, 2.0, 0.5]))
@settings(max_examples=150, deadline=None)
def test_backlogged_teams_stay_within_one_request(
    red: list[int], blue: list[int], blue_weight: float
) -> None:
    weights = {"red": 1.0, "blue": blue_weight}
    teams = {name: Team(name, limits=Limits(weight=weight)) for name, weight in weights.items()}
    arrivals = [(teams["red"], size) for size in red] + [(teams["blue"], size) for size in blue]
    order = asyncio.run(serve(arrivals))
    left = {"red": len(red), "blue": len(blue)}
    served = {"red": 0.0, "blue": 0.0}
    bound = max(size / weights[team.name] for team, size in arrivals)
    for name, size in order:
        left[name] -= 1
        served[name] += size / weights[name]
        assert abs(served["red"] - served["blue"]) <= bound
        if 0 in left.values():
            return


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=40))
@settings(max_examples=50, deadline=None)
def test_nobody_starves(arrivals: list[tuple[str, int]]) -> None:
    """When a team's turn comes, no other is ahead of it by more than one request."""
    order = asyncio.run(serve([(Team(name), size) for name, size in arrivals]))
    assert sorted(order) == sorted(arrivals)
    for name in "abc":
        mine = [size for team, size in arrivals if team == name]
        assert [size for team, size in order if team == name] == mine
        served = dict.fromkeys("abc", 0)
        for team, size in order:
            if team == name:
                assert max(served.values()) <= served[name] + 50
            served[team] += size


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9), st.booleans()), max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_a_cancelled_waiter_leaves_no_trace(arrivals: list[tuple[str, int, bool]]) -> None:
    """The rest is served as if those that were cancelled while waiting had never come."""

    async def run(is_kept: Callable[[bool], bool], cancels: bool) -> list[str]:
        clients = Clients(FairQueue(1))
        await clients.ask("first", RED, 5)
        for index, (name, size, is_cancelled) in enumerate(arrivals):
            if is_kept(is_cancelled):
                await clients.ask(f"{index}", Team(name), size)
        for index, (_, _, is_cancelled) in enumerate(arrivals):
            if cancels and is_cancelled:
                await clients.cancel(f"{index}")
        await clients.ask("last", Team("a"), 1)
        await clients.drain()
        return clients.served

    with_cancelled = asyncio.run(run(lambda _: True, cancels=True))
    assert with_cancelled == asyncio.run(run(lambda is_cancelled: not is_cancelled, cancels=False))
