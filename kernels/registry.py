"""All kernels: every `Kernel` that a module named `kernel` below this package declares."""

import importlib
import pkgutil
from functools import cache
from types import ModuleType

import kernels
from kernels.kernel import Kernel


def kernel_modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(kernels.__path__, "kernels.")
    names = [each.name for each in found if each.name.endswith(".kernel")]
    return [importlib.import_module(name) for name in sorted(names) if name != "kernels.kernel"]


@cache
def all_kernels() -> dict[str, Kernel]:
    """By name. Imports Triton."""
    declared = [
        value
        for module in kernel_modules()
        for value in vars(module).values()
        if isinstance(value, Kernel)
    ]
    return {each.name: each for each in sorted(declared, key=lambda each: each.name)}
