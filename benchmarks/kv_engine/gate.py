"""No numbers of tiers without green tests of them, on the same GPU: their kernels, and engines."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.errors import GateRed
from benchmarks.gate import require_passing
from benchmarks.kernels.gate import require_green
from benchmarks.results import ROOT

KERNEL_TESTS = Path("tests/kernels/gpu")
KERNEL_FILES = ("test_kv_*.py", "test_tiered_*.py")
ENGINE_TESTS = Path("tests/engine_gpu")
ENGINE_FILES = ("test_tier*.py", "test_tokens.py")  # with tiers, and exact
CHOSEN = ("-q", "-x", "-m", "gpu", "-c", "/dev/null", "--rootdir=.")
OPTIONS = (f"--confcutdir={ENGINE_TESTS}", "-p", "no:cacheprovider")
TIMEOUT_S = 300


def require_green_tiers(root: Path = ROOT) -> None:
    """The kernels' tests and the engine's at the same time. Raises GateRed."""
    kernels = [file.name for file in _found(root / KERNEL_TESTS, KERNEL_FILES)]
    engines = [str(file.relative_to(root)) for file in _found(root / ENGINE_TESTS, ENGINE_FILES)]
    with ThreadPoolExecutor() as pool:
        for gate in [pool.submit(require_green, *kernels), pool.submit(_require_engine, engines)]:
            gate.result()


def _found(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """All that there are. Raises GateRed for a pattern that finds nothing."""
    for pattern in patterns:
        files = sorted(folder.glob(pattern))
        if not files:
            raise GateRed(f"expected tests named {pattern} in {folder}, found none")
        yield from files


def _require_engine(files: list[str]) -> None:
    printed = require_passing("pytest", [*CHOSEN, *OPTIONS, *files], ROOT, TIMEOUT_S)
    if " passed" not in printed:
        raise GateRed(f"expected tests that pass in {', '.join(files)}, pytest said:\n{printed}")
