"""How long each phase of a start took, said as it ends."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class StartUp:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started_s = self._clock()
        logger.info("%s ...", name)
        yield
        self.seconds[name] = self._clock() - started_s
        logger.info("%s: %.1f s", name, self.seconds[name])

    def report(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"ready in {sum(self.seconds.values()):.1f} s ({phases})"
