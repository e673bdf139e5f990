"""What is known of an upstream's health, from the requests it was given: a circuit breaker that
decides from memory and never probes."""

import time
from collections import deque
from collections.abc import Callable

MAX_FAILURES = 3
WINDOW_S = 10.0
REST_S = 5.0
TRIAL_S = 30.0


class CircuitBreaker:
    """Opens after MAX_FAILURES failures in a row within WINDOW_S. After REST_S, one request at a
    time may try: its success closes the breaker, its failure begins another rest. A trial that
    never reports is forgotten after TRIAL_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: deque[float] = deque(maxlen=MAX_FAILURES)
        self._opened_s: float | None = None
        self._trial_s: float | None = None

    @property
    def is_open(self) -> bool:
        return self._opened_s is not None

    def can_try(self) -> bool:
        """Looks only; `admit` takes the trial."""
        if self._opened_s is None:
            return True
        now_s = self._clock()
        is_rested = now_s - self._opened_s >= REST_S
        return is_rested and (self._trial_s is None or now_s - self._trial_s >= TRIAL_S)

    def admit(self) -> bool:
        """True when a request may go out now; while the breaker is open, that is the one trial."""
        if not self.can_try():
            return False
        if self._opened_s is not None:
            self._trial_s = self._clock()
        return True

    def succeeded(self) -> None:
        self._failures.clear()
        self._opened_s = self._trial_s = None

    def failed(self) -> None:
        now_s = self._clock()
        self._failures.append(now_s)
        is_full = len(self._failures) == MAX_FAILURES and now_s - self._failures[0] <= WINDOW_S
        if self._opened_s is not None or is_full:
            self._opened_s, self._trial_s = now_s, None

    def gave_up(self) -> None:
        """The request ended for a reason that says nothing about the upstream."""
        self._trial_s = None
