"""How many programs lie on an SM is what the host's plan takes for granted."""

import os
import subprocess
import sys
from pathlib import Path

from kernels.paged_decode.reference import METAS

ROOT = Path(__file__).parents[2]
# Of an SM of compute capability 9.0; CUDA keeps a KiB of each program's for itself.
# (CUDA C++ Programming Guide, Technical Specifications per Compute Capability)
SM_SHARED_BYTES, RESERVED_BYTES = 228 * 1024, 1024


def test_an_sm_has_room_for_as_many_programs_of_paged_decode_as_it_is_dealt(tmp_path: Path):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kernels.resident_code"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    room = SM_SHARED_BYTES // (int(ran.stdout) + RESERVED_BYTES)
    (served,) = (meta for meta in METAS if meta["BLOCK"] == 128)
    assert room == served["programs_per_sm"]
