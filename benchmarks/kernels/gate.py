"""No numbers of kernels without green tests of them, on the same GPU, from the same bundle."""

import subprocess
import sys

from benchmarks.errors import GateRed
from benchmarks.results import ROOT

GATE = "tests.kernels.gpu.run"
TIMEOUT_S = 300


def require_green(*files: str) -> None:
    """GPU tests, all or those in `files`. Raises GateRed."""
    command = [sys.executable, "-m", GATE, *files]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if ran.returncode:
        raise GateRed(
            f"no numbers without green tests: `python -m {' '.join((GATE, *files))}` ended with "
            f"{ran.returncode}:\n{ran.stdout[-6000:]}{ran.stderr[-500:]}"
        )
