"""`python -m benchmarks.kv_attention.tune`: other stages, programs an SM and merges, timed."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.kernels.tune import grid
from benchmarks.kv_attention.cases import MIN_SET_BYTES, SPEEDS, Speed, decode_us
from benchmarks.kv_attention.contexts import cold_bounds, sets_of
from kernels.launch import Launcher, launching
from kernels.tiered_decode import reference

STAGES = (3, 4, 5)
PROGRAMS_PER_SM = (7, 8)
MERGES = {
    "MERGE_META_OF_FEW": grid(COLUMNS=(32, 64, 128), SPLITS=(4, 8, 16, 32), num_warps=(1, 2)),
    "MERGE_META_OF_MANY": grid(COLUMNS=(16, 32, 64), SPLITS=(64, 128, 256), num_warps=(2, 4, 8)),
}
MERGED = ("attn_int4_b1_128k", "attn_int4_b8_32k", "attn_int4_b32_8k")


def main() -> int:
    started_s = time.monotonic()
    with launching(_just_in_time):
        for speed in SPEEDS:
            for words, us in _forms(speed):
                print(f"[{time.monotonic() - started_s:5.1f} s] {us:8.2f} us {speed.name} {words}")
                sys.stdout.flush()
            torch.cuda.empty_cache()
    return 0


def _forms(speed: Speed) -> Iterator[tuple[str, float]]:
    bounds = cold_bounds(speed.lengths)
    sets = sets_of(bounds, speed.formats, MIN_SET_BYTES)
    declared = dict(reference.STAGES)
    for stages in STAGES if speed.formats.value_bits == 4 else STAGES[:2]:
        with _turned("STAGES", declared | {speed.formats: stages}):
            yield f"stages={stages}", decode_us(sets)
    name = "MERGE_META_OF_MANY" if speed.batch == 1 else "MERGE_META_OF_FEW"
    for merge in MERGES[name] if speed.name in MERGED else ():
        with _turned(name, merge):
            yield f"merge {merge}", decode_us(sets)
    del sets
    for programs in PROGRAMS_PER_SM:
        with _turned("PROGRAMS_PER_SM", programs):
            sets = sets_of(bounds, speed.formats, MIN_SET_BYTES)
            yield f"programs an SM={programs}", decode_us(sets)
            del sets


@contextmanager
def _turned(name: str, value: object) -> Iterator[None]:
    declared = getattr(reference, name)
    setattr(reference, name, value)
    try:
        yield
    finally:
        setattr(reference, name, declared)


def _just_in_time(
    launcher: Launcher, grid: tuple[int, ...], arguments: Any, meta: Mapping[str, int]
) -> None:
    launcher.kernel().launch(grid, arguments, meta)


if __name__ == "__main__":
    sys.exit(main())
