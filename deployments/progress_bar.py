"""How far a long computation is, on standard error."""

import sys
import time
from typing import TextIO

BAR_WIDTH = 40


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class ProgressBar:
    """Redrawn in place on a terminal; elsewhere a line each tenth of the way."""

    def __init__(self, what: str, units: str, total: int, stream: TextIO) -> None:
        """`what` is done, such as "measuring", to `total` of `units`, such as "layers"."""
        self._what = what
        self._units = units
        self._total = total
        self._stream = stream
        self._done = 0
        self._started_s = time.monotonic()

    def advance(self) -> None:
        self._done += 1
        elapsed_s = time.monotonic() - self._started_s
        left_s = elapsed_s * (self._total - self._done) / self._done
        counts = f"{self._done}/{self._total} {self._units}, "
        counts += f"{elapsed_s:.0f} s, {left_s:.0f} s left"
        if self._stream.isatty():
            filled = BAR_WIDTH * self._done // self._total
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            end = "\n" if self._done == self._total else ""
            self._stream.write(f"\r{self._what} [{bar}] {counts} {end}")
        elif 10 * self._done // self._total > 10 * (self._done - 1) // self._total:
            self._stream.write(f"{self._what} {counts}\n")
        self._stream.flush()
