"""Processes that have the GPU to themselves: none is started beside another, and none outlives the
one that started it, or what it measures next would be too slow without a word."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from benchmarks.errors import MeasurementFailed
from benchmarks.nvidia_smi import query_gpu
from benchmarks.results import ROOT

MAX_FOREIGN_MIB = 2048
FREED_WITHIN_S = 20.0  # the driver takes its time after a process has gone
WATCH_EVERY_S = 0.2
PARENT_VARIABLE = "FLASHRAY_BENCHMARK_PARENT"


class GpuProcesses:
    """One after the other. `stop`, as signals do: what runs is ended, and nothing starts after."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._running: subprocess.Popen[bytes] | None = None

    def stop_on_signals(self) -> None:
        """So that what was measured until then is still written."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.is_stopped = True
        if self._running is not None:
            _kill_session(self._running)

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> int | None:
        """The exit status; None when it was ended, by `stop` or because `seconds` were over. Its
        output goes to our stderr."""
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())},
            stdout=sys.stderr,
            start_new_session=True,  # an engine has processes of its own: they end with it
        )
        self._running = process
        try:
            if self.is_stopped:
                return None
            status = process.wait(seconds)
            return None if self.is_stopped else status
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._running = None
            _kill_session(process)
            process.wait()


def end_with_parent() -> None:
    """In a process that GpuProcesses started: end its whole session when the parent has gone,
    however that went. (PR_SET_PDEATHSIG would end this process alone, not an engine's core.)"""
    parent = os.environ.get(PARENT_VARIABLE)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(WATCH_EVERY_S)
        os.killpg(0, signal.SIGKILL)

    if parent is not None and os.getpgrp() == os.getpid():
        threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def require_idle_gpu(within_s: float = FREED_WITHIN_S) -> None:
    """Raises MeasurementFailed when somebody else holds memory of the GPU."""
    deadline_s = time.monotonic() + within_s
    while (used_mib := _used_mib()) > MAX_FOREIGN_MIB:
        if time.monotonic() > deadline_s:
            raise MeasurementFailed(
                f"expected a GPU of our own, {used_mib} MiB of its memory are taken; end the "
                "processes that `nvidia-smi` shows"
            )
        time.sleep(0.5)


def _used_mib() -> int:
    (used,) = query_gpu("memory.used")
    return int(used.split()[0])


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
