"""Some kernels start while the one before them ends, and touch nothing until then."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.dependent_code import ACCESS

ROOT = Path(__file__).parents[2]
OVERLAPPING = [
    "kv_append",
    "linear_few_rows",
    "linear_one_row",
    "linear_silu_mul_few_rows",
    "linear_silu_mul_one_row",
    "linear_tiled",
    "paged_decode",
    "paged_decode_merge",
    "rms_norm",
    "rms_norm_residual",
    "rope_append",
    "rotary",
    "silu_mul",
    "tiered_append",
    "tiered_decode",
    "tiered_decode_merge",
]


def test_they_wait_before_they_touch_memory(tmp_path: Path):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.dependent_code", *OVERLAPPING, "grey"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {**dict.fromkeys(OVERLAPPING, "waits"), "grey": "plain"}


@pytest.mark.parametrize(
    ("line", "touches"),
    [
        ("\tld.global.b32 \t{ %r1 }, [ %rd1 + 0 ];", True),
        ("\t@%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1 };", True),
        ("\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;", True),
        ("\tatom.global.gpu.acq_rel.add.u32 %r1, [ %rd1 + 0 ], %r2;", True),
        ("\tld.param.b64 \t%rd1, [kernel_param_0];", False),
        ("\tst.shared.b32 [ %r1 + 0 ], %r2;", False),
        ("\tgriddepcontrol.launch_dependents;", False),
        ("\tprefetch.global.L2 [%rd1];", False),
    ],
)
def test_what_touches_memory(line: str, touches: bool):
    assert bool(ACCESS.search(line)) == touches
