"""`python -m tests.kernels.gpu.sanitize`: compute-sanitizer finds the planted bugs, and no others.

Exits with 1 and says why when a planted bug is missed, or a shipped kernel has one.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 300
# Memory between an allocation's end and its block's end is the program's own to memcheck: torch's
# pool has to go, or an overrun stays unseen.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_INTERPRET": "0"}
# cuda.core asks the driver for functions that it may not have: the refusals are no errors.
OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
SUMMARY = re.compile(
    r"ERROR SUMMARY: (?P<errors>\d+) error|RACECHECK SUMMARY: (?P<hazards>\d+) hazard"
)


@dataclass(frozen=True)
class Run:
    tool: str
    script: str
    has_bug: bool


RUNS = (
    Run("memcheck", "planted_overrun", has_bug=True),
    Run("racecheck", "planted_race", has_bug=True),
    Run("memcheck", "clean", has_bug=False),
    Run("racecheck", "clean", has_bug=False),
)


def num_found(output: str) -> int | None:
    """The errors or hazards of a sanitizer's summary; None where it wrote none."""
    found = [int(each["errors"] or each["hazards"] or 0) for each in SUMMARY.finditer(output)]
    return sum(found) if found else None


def problem(run: Run, output: str, returncode: int) -> str | None:
    """What is wrong with the outcome of a run."""
    found = num_found(output)
    if found is None:
        return f"{run.tool} wrote no summary"
    if run.has_bug:
        return None if found else f"{run.tool} missed the planted bug"
    if found:
        return f"{run.tool} found {found} in the shipped kernels"
    if returncode or not re.search(r"^ran \d+ kernels", output, re.MULTILINE):
        return f"the kernels did not all run (exit status {returncode})"
    return None


def sanitizer() -> str | None:
    folders = [os.environ.get("PATH", "")]
    for cuda in sorted(Path("/usr/local").glob("cuda*"), reverse=True):
        folders += [str(cuda / "bin"), str(cuda / "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def execute(program: str, run: Run) -> tuple[str, int]:
    script = [sys.executable, "-m", f"tests.kernels.gpu.{run.script}"]
    command = [program, "--tool", run.tool, *OPTIONS[run.tool], *script]
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
        return f"it took longer than {TIMEOUT_S} s", 1
    return ran.stdout, ran.returncode


def problems(program: str) -> Iterator[str]:
    for run in RUNS:
        output, returncode = execute(program, run)
        wrong = problem(run, output, returncode)
        print(f"{run.tool:9} {run.script:16} {wrong or f'as expected: {num_found(output)} found'}")
        if wrong:
            yield f"{run.tool} of {run.script}: {wrong}\n{output[-3000:]}"


def main() -> int:
    program = sanitizer()
    if program is None:
        print(
            "expected compute-sanitizer on PATH or below /usr/local/cuda*; it comes with the CUDA "
            "toolkit (package cuda-sanitizer)",
            file=sys.stderr,
        )
        return 1
    wrong = list(problems(program))
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
