"""Compile one form of each kernel for a GPU with dependent launch, and count what it loads and what
it stores before it waits for the kernels before it; `null` where it never does.

Run in a process of its own, for Triton decides when it is imported whether it compiles:
`python -m tests.kernels.dependent_code KERNEL...` prints JSON.
"""

import json
import re
import sys

from kernels.bundle.compile import Task, compiled
from kernels.dependent_launch import FIRST_ARCH
from kernels.registry import all_kernels

WAIT = "griddepcontrol.wait"
LOAD = re.compile(r"^\s*(?:@\S+ )?(?:ld|cp\.async)\b(?!\.param|\.shared)", re.MULTILINE)
STORE = re.compile(r"^\s*(?:@\S+ )?(?:st|atom|red)\b(?!\.shared)", re.MULTILINE)


def before_the_wait(name: str) -> tuple[int, int] | None:
    code = compiled(Task(name, all_kernels()[name].variants[0], FIRST_ARCH))
    before, wait, _ = code.ptx.decode().partition(WAIT)
    assert bool(wait) == code.waits, name
    return (len(LOAD.findall(before)), len(STORE.findall(before))) if wait else None


if __name__ == "__main__":
    json.dump({name: before_the_wait(name) for name in sys.argv[1:]}, sys.stdout)
