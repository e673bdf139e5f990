"""Some kernels start while the one before them ends, and store nothing until then."""

import json
from pathlib import Path

import pytest

from tests.kernels.compiling import output_of
from tests.kernels.dependent_code import LOAD, STORE

# What they load before: of plans, tables and lengths, which no kernel stores right before them.
LOADS_BEFORE = {
    "kv_append": 0,
    "linear_few_rows": 0,
    "linear_one_row": 0,
    "linear_silu_mul_few_rows": 0,
    "linear_silu_mul_one_row": 0,
    "linear_tiled": 0,
    "paged_decode": 2,
    "paged_decode_merge": 1,
    "rms_norm": 0,
    "rms_norm_residual": 0,
    "rope_append": 0,
    "silu_mul": 0,
    "tiered_append": 0,
    "tiered_decode": 8,
    "tiered_decode_merge": 2,
    "tiered_skip": 8,
    "tiered_skip_again": 4,
    "tiered_skip_merge": 2,
}


def test_they_wait_before_they_touch_memory(tmp_path: Path):
    names = (*LOADS_BEFORE, "grey")
    printed = output_of("tests.kernels.dependent_code", *names, cache=tmp_path)
    expected = {name: [num_loads, 0] for name, num_loads in LOADS_BEFORE.items()}
    assert json.loads(printed) == {**expected, "grey": None}


@pytest.mark.parametrize(
    ("line", "loads", "stores"),
    [
        ("\tld.global.b32 \t{ %r1 }, [ %rd1 + 0 ];", True, False),
        ("\t@%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1 };", False, True),
        ("\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;", True, False),
        ("\tatom.global.gpu.acq_rel.add.u32 %r1, [ %rd1 + 0 ], %r2;", False, True),
        ("\tld.param.b64 \t%rd1, [kernel_param_0];", False, False),
        ("\tst.shared.b32 [ %r1 + 0 ], %r2;", False, False),
        ("\tgriddepcontrol.launch_dependents;", False, False),
        ("\tprefetch.global.L2 [%rd1];", False, False),
    ],
)
def test_what_touches_memory(line: str, loads: bool, stores: bool):
    assert (bool(LOAD.search(line)), bool(STORE.search(line))) == (loads, stores)
