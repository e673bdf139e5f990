"""Modules that compile kernels, run in a process of their own: Triton decides when it is imported
whether it compiles, and tests import it to interpret."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of(module: str, *arguments: str, cache: Path, **environment: str) -> str:
    """What `python -m module` printed, which has to succeed. cache: for compiled code."""
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | settings | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
