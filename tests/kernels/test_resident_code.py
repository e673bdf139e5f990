"""How many programs lie on an SM is what the host's plan takes for granted."""

from pathlib import Path

from kernels.paged_decode.reference import METAS
from tests.kernels.compiling import output_of

# Of an SM of compute capability 9.0; CUDA keeps a KiB of each program's for itself.
# (CUDA C++ Programming Guide, Technical Specifications per Compute Capability)
SM_SHARED_BYTES, RESERVED_BYTES = 228 * 1024, 1024


def test_an_sm_has_room_for_as_many_programs_of_paged_decode_as_it_is_dealt(tmp_path: Path):
    num_bytes = int(output_of("tests.kernels.resident_code", cache=tmp_path))
    room = SM_SHARED_BYTES // (num_bytes + RESERVED_BYTES)
    (served,) = (meta for meta in METAS if meta["BLOCK"] == 128)
    assert room == served["programs_per_sm"]
