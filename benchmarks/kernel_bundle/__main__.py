"""`python -m benchmarks.kernel_bundle`: results/kernel-bundle-cpu.json, in about two minutes on a
quiet machine. Needs no GPU."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from benchmarks.command import Progress, run_benchmark
from benchmarks.errors import MeasurementFailed
from benchmarks.results import ROOT, Row

GATE = (
    "tests/kernels/test_bundle.py",
    "tests/kernels/test_bundle_launching.py",
    "tests/kernels/test_bundle_sources.py",
    "tests/kernels/test_command.py",
)
PACKAGES = ("torch", "triton")
MAX_COLD_S_PER_8 = 15
MAX_LOAD_S = 0.4
NUM_LOADS = 5
TIMEOUT_S = 600


def measure(progress: Progress) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "FLASHRAY_KERNEL_BUNDLE": f"{folder}/bundle",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        return _builds(progress, environment) + _loads(progress, environment)


def _builds(progress: Progress, environment: Mapping[str, str]) -> list[Row]:
    progress("cold build")
    cold_s, said = _timed(["kernels", "build"], environment)
    num_compiled = _number(r": (\d+) compiled, 0 kept", said)
    progress("warm build")
    warm_s, said = _timed(["kernels", "build"], environment)
    num_kept = _number(r": 0 compiled, (\d+) kept", said)
    progress("verify")
    _timed(["kernels", "verify"], environment)  # it fails unless every variant is there
    table = _timed(["kernels", "list"], environment)[1]
    num_kernels = len(table.splitlines()) - 2
    what = f"{num_kernels} kernels"
    megabytes = _number(r"([\d.]+) MB", said)
    return [
        Row(f"cold build, {what}", "build_s", "s", "lower", cold_s),
        Row("cold build, per 8 kernels", "build_s", "s", "lower", 8 * cold_s / num_kernels,
            floor=MAX_COLD_S_PER_8),
        Row(f"warm build, {what}", "build_s", "s", "lower", warm_s),
        Row(f"built, {what} x 4 archs", "built_share", "share", "higher", num_kept / num_compiled,
            floor=1),
        Row(f"variants x archs, {what}", "num_compiled", "count", "higher", num_compiled),
        Row(f"size, {what}", "size_mb", "MB", "lower", megabytes),
    ]  # fmt: skip


def _loads(progress: Progress, environment: Mapping[str, str]) -> list[Row]:
    progress("new processes")
    first = _first_functions("bundle", environment)
    all_of_gpu = _first_functions("all", environment)
    triton = _first_functions("triton", environment)
    peer = "triton's warm cache"
    ready, whole = "ready_s", "with_imports_s"
    num_functions = round(all_of_gpu["num_functions"])
    return [
        Row("first function, after torch", ready, "s", "lower", first[ready], peer, triton[ready],
            MAX_LOAD_S, "value"),
        Row(f"{num_functions} functions, after torch", ready, "s", "lower", all_of_gpu[ready],
            floor=MAX_LOAD_S),
        Row("first function, from process start", whole, "s", "lower", first[whole], peer,
            triton[whole]),
    ]  # fmt: skip


def _first_functions(way: str, environment: Mapping[str, str]) -> dict[str, float]:
    """Medians over new processes."""
    module = "benchmarks.kernel_bundle.first_function"
    reports = [
        json.loads(_timed([module, str(time.monotonic()), way], environment)[1])
        for _ in range(NUM_LOADS)
    ]
    return {name: statistics.median(each[name] for each in reports) for name in reports[0]}


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise MeasurementFailed(f"expected {pattern!r} in what the command said, came {text!r}")
    return float(found[1])


def _timed(module: list[str], environment: Mapping[str, str]) -> tuple[float, str]:
    """Seconds from start to end, and what it printed."""
    started_s = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", *module], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    if ran.returncode != 0:
        raise MeasurementFailed(f"`{' '.join(module)}` failed:\n{ran.stdout}{ran.stderr[-3000:]}")
    return time.monotonic() - started_s, ran.stdout


if __name__ == "__main__":
    sys.exit(
        run_benchmark("kernel-bundle-cpu", GATE, measure, PACKAGES, "benchmarks.kernel_bundle")
    )
