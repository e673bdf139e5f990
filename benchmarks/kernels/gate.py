"""No numbers of kernels without green tests of them, on the same GPU, from the same bundle."""

from benchmarks.gate import require_passing
from benchmarks.results import ROOT

GATE = "tests.kernels.gpu.run"
TIMEOUT_S = 300


def require_green(*files: str) -> None:
    """GPU tests, all or those in `files`. Raises GateRed."""
    require_passing(GATE, files, ROOT, TIMEOUT_S)
