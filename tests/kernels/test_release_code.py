import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ["silu_mul", "rms_norm_residual", "rope_append"]


def test_the_decorator_leaves_the_release_code_as_it_is(tmp_path: Path):
    environment = {
        "TRITON_INTERPRET": "0",
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_DISABLE_LINE_INFO": "1",  # the two lie in different files
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.release_code", str(tmp_path), *KERNELS],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
