"""`python -m tests.kernels.gpu.run [FILE ...]`: the GPU tests, a process for each file, several at
a time; those that measure time or memory have the GPU to themselves, at the end.

Exits with 1 and shows what failed.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
ALONE = ("test_bundle.py", "test_launch_cost.py", "test_scope.py")
PYTEST = ("-m", "pytest", "-q", "-x", "-m", "gpu", "-c", "/dev/null", "--rootdir=.")
OPTIONS = (f"--confcutdir={FOLDER.relative_to(ROOT)}", "-p", "no:cacheprovider")
THREADS = 2  # of a process: most of its time is compilation, and references on the CPU
TIMEOUT_S = 300
MAX_OUTPUT = 3000


@dataclass(frozen=True)
class Ran:
    file: str
    output: str
    passed: bool

    @property
    def summary(self) -> str:
        lines = self.output.strip().splitlines() or ["no output"]
        return f"{self.file:28} {lines[-1]}"


def run(file: str) -> Ran:
    command = [sys.executable, *PYTEST, *OPTIONS, str((FOLDER / file).relative_to(ROOT))]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    try:
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Ran(file, f"took longer than {TIMEOUT_S} s", passed=False)
    return Ran(file, ran.stdout, passed=ran.returncode == 0 and " passed" in ran.stdout)


def run_all(files: Sequence[str]) -> bool:
    together = [file for file in files if file not in ALONE]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // THREADS)) as pool:
        results = list(pool.map(run, together))
    results += [run(file) for file in files if file in ALONE]
    for ran in results:
        print(ran.summary)
    for ran in results:
        if not ran.passed:
            print(f"\n{ran.file}:\n{ran.output[-MAX_OUTPUT:]}")
    return all(ran.passed for ran in results)


if __name__ == "__main__":
    chosen = sys.argv[1:] or sorted(file.name for file in FOLDER.glob("test_*.py"))
    sys.exit(0 if run_all(chosen) else 1)
