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
            if not _is_ready(process, ready_url, timeout_s):
                log.seek(0)
                raise MeasurementFailed(
                    f"expected {ready_url} to answer within {timeout_s:.0f} s, but `{command[0]} "
                    f"... {command[-1]}` said:\n{log.read()[-3000:]}"
                )
            yield process.pid
        finally:
            _stop(process)


def _is_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), opener.open(url, timeout=5) as answer:
            if answer.status == 200:
                return True
        time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
