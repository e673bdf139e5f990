"""No numbers without green tests of what is measured."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.errors import GateRed

MAX_PRINTED = 6000  # characters of it that are shown


def require_passing(module: str, arguments: Sequence[str], root: Path, timeout_s: float) -> str:
    """What `python -m module` printed in `root`. Raises GateRed, with the end of that, where it did
    not end with 0, or not in time."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            ran = subprocess.run(
                [sys.executable, "-u", "-m", module, *arguments],
                cwd=root,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
            failure = f"ended with {ran.returncode}" if ran.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"took longer than {timeout_s:g} s (is the machine busy?), and had printed"
        log.seek(0)
        printed = log.read()
    if failure is not None:
        command = " ".join(("python", "-m", module, *arguments))
        raise GateRed(
            f"no numbers without green tests: `{command}` {failure}:\n{printed[-MAX_PRINTED:]}"
        )
    return printed
