"""Compile the form of paged_decode for heads of 128 channels, and print how much shared memory a
program of it takes.

Run in a process of its own, for Triton decides when it is imported whether it compiles:
`python -m tests.kernels.resident_code` prints bytes.
"""

import sys

from kernels.bundle.compile import Task, compiled
from kernels.registry import all_kernels

ARCH = 90


def shared_bytes() -> int:
    variants = all_kernels()["paged_decode"].variants
    (served,) = (each for each in variants if dict(each.meta)["BLOCK"] == 128)
    return compiled(Task("paged_decode", served, ARCH)).shared_bytes


if __name__ == "__main__":
    sys.stdout.write(f"{shared_bytes()}")
