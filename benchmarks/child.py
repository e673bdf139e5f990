"""A process under measurement: started on chosen cores, awaited over HTTP, ended by its pid."""

import contextlib
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from benchmarks.errors import MeasurementFailed
from benchmarks.results import ROOT

STOP_TIMEOUT_S = 40  # Serve takes its time


@contextmanager
def child(
    command: Sequence[str],
    ready_url: str,
    *,
    cores: set[int] | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 120,
) -> Iterator[int]:
    """The pid, once `ready_url` answers 200; gone on exit. `cores` None leaves it where the system
    puts it. Raises MeasurementFailed with the end of its output."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            if cores is not None:
                os.sched_setaffinity(process.pid, cores)  # threads and children inherit it
            failure = _await(process, ready_url, timeout_s)
            if failure is not None:
                log.seek(0)
                raise MeasurementFailed(
                    f"`{command[0]} ... {command[-1]}` {failure}; it said:\n{log.read()[-3000:]}"
                )
            yield process.pid
        finally:
            _stop(process)


def _await(process: subprocess.Popen[bytes], url: str, timeout_s: float) -> str | None:
    """What it did instead of answering; None once it answers."""
    started_s = time.monotonic()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while (waited_s := time.monotonic() - started_s) < timeout_s:
        if (status := process.poll()) is not None:
            return f"ended with {status} after {waited_s:.0f} s, before {url} answered"
        with contextlib.suppress(OSError), opener.open(url, timeout=5) as answer:
            if answer.status == 200:
                return None
        time.sleep(0.1)
    return f"did not answer at {url} within {timeout_s:.0f} s"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
