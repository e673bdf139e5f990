"""Compile one form of each kernel for a GPU with dependent launch, and say how it begins: that it
`waits` for the kernels before it, `touches` memory before it does, or is `plain`.

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
ACCESS = re.compile(
    r"^\s*(?:@\S+ )?(?:ld|st|atom|red|cp\.async)\b(?!\.param|\.shared)", re.MULTILINE
)


def begins(name: str) -> str:
    code = compiled(Task(name, all_kernels()[name].variants[0], FIRST_ARCH))
    before, wait, _ = code.ptx.decode().partition(WAIT)
    assert bool(wait) == code.waits, name
    if not wait:
        return "plain"
    return "touches" if ACCESS.search(before) else "waits"


if __name__ == "__main__":
    json.dump({name: begins(name) for name in sys.argv[1:]}, sys.stdout)
