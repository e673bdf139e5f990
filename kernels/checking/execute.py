"""Run the programs of a launch, one after the other, under the checked builder."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from kernels.checking.builder import CheckedBuilder, CheckedReduce, CheckedScan, check_operands
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
    """All is put back, whatever happens."""
    builder = interpreter.interpreter_builder
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        # A device function would patch the language again at each call, and not put it back.
        scope.set_attr(interpreter, "_patch_lang", lambda function: scope)
        # Triton 3.6 makes no int of an array of one element, which numpy 2.4 refuses to do for it.
        scope.set_attr(tl.core.tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(interpreter, "ReduceOps", CheckedReduce)
        scope.set_attr(interpreter, "ScanOps", CheckedScan)
        scope.set_attr(TritonSemantic, "binary_op_sanitize_overflow_impl", check_operands)
        # Not another builder: whoever holds this one, such as a function that a launch of someone
        # else's left patched, is checked too.
        scope.set_attr(builder, "__class__", CheckedBuilder)
        scope.set_attr(builder, "options", interpreter.InterpreterOptions(debug=True))
        scope.set_attr(builder, "grid_dim", memory.grid)
        scope.set_attr(builder, "grid_idx", None)
        for each in (builder, CheckedReduce, CheckedScan):
            scope.set_attr(each, "memory", memory)
        yield builder
    finally:
        scope.restore()
