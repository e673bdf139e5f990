"""Compile kernels as they are declared, and the same functions under `triton.jit` alone.

Run in a process of its own, for Triton decides when it is imported whether it compiles:
`python -m tests.kernels.release_code FOLDER KERNEL...`; it prints the names whose PTX differs.
"""

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from kernels.bundle.compile import Task, compiled
from kernels.kernel import Kernel
from kernels.registry import all_kernels

ARCH = 90


def plain(kernel: Kernel, folder: Path) -> Any:
    """The kernel's function from its module's source, with `@triton.jit` in place of `@kernel`."""
    module = inspect.getmodule(kernel.function)
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == kernel.function.__name__:
            node.decorator_list = [ast.parse("triton.jit", mode="eval").body]
    file = folder / f"plain_{kernel.name}.py"
    file.write_text("import triton\n" + ast.unparse(tree))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return getattr(copy, kernel.function.__name__)


def differs(kernel: Kernel, folder: Path) -> bool:
    task = Task(kernel.name, kernel.variants[0], ARCH)
    declared = compiled(task).ptx
    kernel.jit = plain(kernel, folder)
    return compiled(task).ptx != declared or b".entry " not in declared


if __name__ == "__main__":
    names = [name for name in sys.argv[2:] if differs(all_kernels()[name], Path(sys.argv[1]))]
    sys.stdout.write(" ".join(names))
