"""`python -m tests.kernels.gpu.run [FILE ...]`: the GPU tests, dealt over a process for each core
that we may run on; the files that measure time or memory have the GPU to themselves, at the end.

Exits with 1 and shows what failed.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
ALONE = ("test_bundle.py", "test_launch_cost.py", "test_scope.py")
NUM_SLOWEST = 10
PYTEST = ("-m", "pytest", "-q", "-x", "-m", "gpu", "-c", "/dev/null", "--rootdir=.")
OPTIONS = (f"--confcutdir={FOLDER.relative_to(ROOT)}", "-p", "no:cacheprovider")
REPORT = (f"--durations={NUM_SLOWEST}", "-p", "tests.kernels.gpu.shard")
DURATION = re.compile(r"^(\d+\.\d\d)s .*$", re.MULTILINE)
MAX_SHARDS = 32  # each takes half a gigabyte of the GPU for its CUDA context
# Of a shard, which compiles for most of its time.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
TIMEOUT_S = 200  # below that of whoever runs this as a gate: it can then say which did not end
MAX_OUTPUT = 4000


@dataclass(frozen=True)
class Ran:
    name: str
    seconds: float
    output: str
    has_failed: bool

    @property
    def summary(self) -> str:
        lines = self.output.strip().splitlines() or ["no output"]
        return f"{self.name:20} {self.seconds:6.1f} s  {lines[-1]}"


def run(name: str, files: Sequence[str], *options: str) -> Ran:
    command = [sys.executable, *PYTEST, *OPTIONS, *REPORT, *options]
    command += [str(FOLDER / file) for file in files]
    started_s = time.monotonic()
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ran(name, TIMEOUT_S, f"took longer than {TIMEOUT_S} s", has_failed=True)
    has_failed = ran.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return Ran(name, time.monotonic() - started_s, ran.stdout, has_failed)


def num_cores() -> int:
    """That this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_each(files: Sequence[str]) -> Iterator[Ran]:
    """As they end: the shards of what runs together, then what runs alone."""
    count = min(num_cores(), MAX_SHARDS)
    if together := [file for file in files if file not in ALONE]:
        with ThreadPoolExecutor(count) as pool:
            shards = [f"{number}/{count}" for number in range(1, count + 1)]
            running = [pool.submit(run, f"shard {s}", together, "--shard", s) for s in shards]
            yield from (ended.result() for ended in as_completed(running))
    yield from (run(file, [file]) for file in files if file in ALONE)


def run_all(files: Sequence[str]) -> bool:
    results = []
    for ran in run_each(files):
        print(ran.summary, flush=True)
        results.append(ran)
    durations = [found for ran in results for found in DURATION.finditer(ran.output)]
    durations.sort(key=lambda found: float(found[1]), reverse=True)
    print("slowest:", *(found[0] for found in durations[:NUM_SLOWEST]), sep="\n")
    for ran in results:
        if ran.has_failed:
            print(f"\n{ran.name}:\n{ran.output[-MAX_OUTPUT:]}")
    has_passed = any(" passed" in ran.output for ran in results)
    if not has_passed:
        print("no test passed")
    return has_passed and not any(ran.has_failed for ran in results)


if __name__ == "__main__":
    chosen = sys.argv[1:] or sorted(file.name for file in FOLDER.glob("test_*.py"))
    sys.exit(0 if run_all(chosen) else 1)
