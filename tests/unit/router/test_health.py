"""The breaker: when it opens, when it tries again, and that it never holds anybody up."""

import time

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.backends.health import MAX_FAILURES, REST_S, TRIAL_S, WINDOW_S, CircuitBreaker


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def opened() -> tuple[CircuitBreaker, Clock]:
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(MAX_FAILURES):
        assert breaker.admit()
        breaker.failed()
    assert breaker.is_open
    return breaker, clock


def test_open_means_no_request_until_it_has_rested():
    breaker, clock = opened()
    assert not breaker.admit()
    clock.now_s = REST_S - 0.01
    assert not breaker.admit()
    clock.now_s = REST_S
    assert breaker.admit()
    assert not breaker.admit()  # one trial at a time
    breaker.succeeded()
    assert breaker.admit()
    assert breaker.admit()


def test_a_failed_trial_begins_another_rest():
    breaker, clock = opened()
    clock.now_s = REST_S
    assert breaker.admit()
    breaker.failed()
    clock.now_s = 2 * REST_S - 0.01
    assert not breaker.admit()
    clock.now_s = 2 * REST_S
    assert breaker.admit()


def test_a_trial_that_says_nothing_gives_its_place_back():
    breaker, clock = opened()
    clock.now_s = REST_S
    assert breaker.admit()
    breaker.gave_up()
    assert breaker.admit()
    clock.now_s += TRIAL_S
    assert breaker.admit()


def test_looking_takes_nothing():
    breaker, clock = opened()
    clock.now_s = REST_S
    assert breaker.can_try()
    assert breaker.can_try()
    assert breaker.admit()


def test_failures_far_apart_or_not_in_a_row_open_nothing():
    clock = Clock()
    breaker = CircuitBreaker(clock)
    for _ in range(10):
        breaker.failed()
        clock.now_s += WINDOW_S / (MAX_FAILURES - 1) + 0.1
    for _ in range(10):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert not breaker.is_open


def test_a_decision_takes_less_than_a_millisecond():
    breaker, _ = opened()
    started_s = time.perf_counter()
    for _ in range(1000):
        breaker.admit()
    assert time.perf_counter() - started_s < 1.0


class BreakerMachine(RuleBasedStateMachine):
    """Against the rules in words: a list of outcomes and the time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = CircuitBreaker(self.clock)
        self.failures: list[float] = []
        self.num_in_flight = 0
        self.last_failure_s = 0.0

    @rule(elapsed_s=st.sampled_from([0.1, 1.0, 4.9, 5.0, 11.0]))
    def wait(self, elapsed_s: float) -> None:
        self.clock.now_s += elapsed_s

    @rule()
    def ask(self) -> None:
        was_open = self.breaker.is_open
        if self.breaker.admit():
            if was_open:
                assert self.clock.now_s - self.last_failure_s >= REST_S
            self.num_in_flight += 1

    @rule()
    def fail(self) -> None:
        if self.num_in_flight:
            self.num_in_flight -= 1
            self.last_failure_s = self.clock.now_s
            self.failures.append(self.clock.now_s)
            self.breaker.failed()

    @rule()
    def succeed(self) -> None:
        if self.num_in_flight:
            self.num_in_flight -= 1
            self.failures.clear()
            self.breaker.succeeded()
            assert not self.breaker.is_open

    @invariant()
    def open_only_after_enough_failures_in_a_row(self) -> None:
        if self.breaker.is_open:
            assert len(self.failures) >= MAX_FAILURES


BreakerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestBreaker = BreakerMachine.TestCase
