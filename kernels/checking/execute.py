"""Run the programs of a launch, one after the other, under the checked builder."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from kernels.checking.builder import CheckedBuilder, CheckedReduce, CheckedScan
from kernels.checking.memory import Memory
from kernels.errors import KernelError
from kernels.kernel import Kernel

_one_at_a_time = threading.Lock()  # the interpreter is one object of the process


def execute(
    kernel: Kernel, grid: Sequence[int], arguments: Sequence[Any], meta: Mapping[str, int]
) -> None:
    """Raises CheckFailure. The contract must have been checked."""
    declared = kernel.contract.tensors.items()
    tensors = [(*each, tensor) for each, tensor in zip(declared, arguments, strict=False)]
    for name, _, tensor in tensors:
        if not tensor.is_cpu:
            raise KernelError(
                f"{kernel.name}: the checked interpreter takes tensors on the CPU, "
                f"{name} is on {tensor.device}"
            )
    whole_grid = (*grid, 1, 1)[:3]
    memory = Memory(kernel.name, tensors, whole_grid)
    with _one_at_a_time, installed(memory) as builder, np.errstate(all="ignore"):
        function = kernel.jit.rewrite()
        for program, place in enumerate(itertools.product(*map(range, whole_grid))):
            memory.program = program
            builder.set_grid_idx(*place)
            run_program(kernel, function, parameters(kernel, memory, arguments, meta), place)
    memory.finish()


def parameters(
    kernel: Kernel, memory: Memory, arguments: Sequence[Any], meta: Mapping[str, int]
) -> dict[str, Any]:
    """By name, as Triton's tensors. New for each program: an operation may change its operand."""
    found: dict[str, Any] = {name: meta[name] for name in kernel.constexprs if name in meta}
    for region in memory.regions:
        dtype = interpreter._implicit_cvt(region.tensor).dtype
        handle = interpreter.TensorHandle(np.array([region.base], np.uint64), dtype)
        found[f"{region.name}_ptr"] = tl.tensor(handle, dtype)
    scalars = arguments[len(memory.regions) :]
    for name, value in zip(kernel.contract.scalars, scalars, strict=True):
        if isinstance(value, float):  # float32 as on a GPU
            handle = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
            found[name] = tl.tensor(handle, tl.float32)
        else:
            found[name] = interpreter._implicit_cvt(value)
    return found


def run_program(kernel: Kernel, function: Any, named: dict[str, Any], place: Any) -> None:
    try:
        function(**named)
    except Exception as failure:
        cause: BaseException = failure
        while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if not isinstance(cause, KernelError):
            cause.add_note(f"in program {place} of kernel {kernel.name}")
        if cause is failure:
            raise
        raise cause from None


@contextmanager
def installed(memory: Memory) -> Iterator[Any]:
    """The interpreter's own builder changes its class: whoever holds it, such as a function that
    an earlier launch left patched, is checked too. All is put back, whatever happens."""
    builder = interpreter.interpreter_builder
    former_class, former_state = builder.__class__, dict(vars(builder))
    former = {name: getattr(interpreter, name) for name in ("_patch_lang", "ReduceOps", "ScanOps")}
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        # A device function would patch the language again at each call, and not put it back.
        interpreter._patch_lang = lambda function: scope
        CheckedReduce.memory = CheckedScan.memory = memory
        interpreter.ReduceOps, interpreter.ScanOps = CheckedReduce, CheckedScan
        builder.__class__ = CheckedBuilder
        builder.memory = memory
        builder.options = interpreter.InterpreterOptions(debug=True)
        builder.set_grid_dim(*memory.grid)
        yield builder
    finally:
        builder.__class__ = former_class
        vars(builder).clear()
        vars(builder).update(former_state)
        for name, value in former.items():
            setattr(interpreter, name, value)
        scope.restore()
