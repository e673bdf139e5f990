"""Triton's interpreter with every access checked, and with the arithmetic of a GPU.

The interpreter keeps bfloat16 as 16 bits and computes with them as with integers, or drops the
lower half of a float32; here they are widened, and results are rounded to nearest, ties to even.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime.interpreter import (
    InterpreterBuilder,
    ReduceOps,
    ScanOps,
    TensorHandle,
    _get_np_dtype,
    _ir,
)

from kernels.checking.memory import Memory
from kernels.checking.statement import statement
from kernels.errors import DeviceAssertion, KernelError, OutOfBounds

Array = npt.NDArray[Any]
# What a masked lane loads is undefined where the kernel does not say it.
UNDEFINED_INTEGER = 0x5A
BF16_NAN = 0x7FFF
EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


class CheckedBuilder(InterpreterBuilder):  # type: ignore[misc]
    """The class that the interpreter's builder has during a launch."""

    memory: Memory

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, *hints: Any, **named_hints: Any
    ) -> Any:
        if other is None:
            other = undefined(ptrs)
        real = self._real("load", ptrs, mask.data)
        return super().create_masked_load(real, mask, other, *hints, **named_hints)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *hints: Any) -> Any:
        real = self._real("store", ptrs, mask.data, value.data)
        return super().create_masked_store(real, value, mask, *hints)

    def create_atomic_cas(self, ptr: Any, *operands: Any) -> Any:
        real = self._real("atomic", ptr, np.ones(ptr.data.shape, bool))
        return super().create_atomic_cas(real, *operands)

    def create_atomic_rmw(self, op: Any, ptr: Any, value: Any, mask: Any, *order: Any) -> Any:
        if is_bf16(value):
            raise KernelError(
                f"{self.memory.kernel}: an atomic of bfloat16 cannot be checked, for Triton's "
                f"interpreter has none: add up in float32\n  {statement()}"
            )
        real = self._real("atomic", ptr, mask.data)
        return super().create_atomic_rmw(op, real, value, mask, *order)

    def create_gather(self, src: Any, indices: Any, axis: int) -> Any:
        length, where = src.data.shape[axis], indices.data
        outside = (where < 0) | (where >= length)
        if outside.any():
            what = f"gather at index {where[outside][0]} of {length} lanes"
            raise self.memory.failure(OutOfBounds, what, int(outside.sum()), outside.size)
        return super().create_gather(src, indices, axis)

    def create_assert(self, condition: Any, message: str) -> None:
        self._require(condition, f"device_assert failed: {message}")

    def create_assume(self, condition: Any) -> None:
        self._require(condition, "tl.assume of what is not so")

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        data = widened(src)
        if dst_type.scalar == tl.bfloat16:
            return TensorHandle(to_bf16(data.astype(np.float32)), tl.bfloat16)
        return TensorHandle(data.astype(_get_np_dtype(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        has_fp8 = 8 in (src.dtype.scalar.primitive_bitwidth, dst_type.scalar.primitive_bitwidth)
        if has_fp8 or rounding_mode != _ir.ROUNDING_MODE.RTNE:
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Array]) -> Any:
        if not is_bf16(lhs):
            return super().binary_op(lhs, rhs, op)
        return rounded(op(widened(lhs), widened(rhs)))

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Callable[..., Array]) -> Any:
        if not is_bf16(other) or op is np.where:  # which moves bits and computes nothing
            return super().ternary_op(lhs, rhs, other, op)
        return rounded(op(widened(lhs), widened(rhs), widened(other)))

    def unary_op(self, arg: Any, op: Callable[..., Array]) -> Any:
        return rounded(op(widened(arg))) if is_bf16(arg) else super().unary_op(arg, op)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        """Rounded once: the product of two float32 is exact in float64."""
        if z.dtype.scalar == tl.float64:
            return super().create_fma(x, y, z)
        exact = widened(x).astype(np.float64) * widened(y) + widened(z)
        if is_bf16(z):
            return rounded(exact.astype(np.float32))
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        """Sums of float32 are rounded once: numpy's own order of them depends on a row's place."""
        a, b = (TensorHandle(widened(e), tl.float32) if is_bf16(e) else e for e in (a, b))
        if d.dtype.scalar != tl.float32:
            return super().create_dot(a, b, d, *precision)
        wide = TensorHandle(d.data.astype(np.float64), tl.float64)
        sums = super().create_dot(a, b, wide, *precision).data
        return TensorHandle(sums.astype(np.float32), tl.float32)

    def _real(self, operation: Any, ptrs: Any, mask: Array, values: Array | None = None) -> Any:
        num_bytes = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        lanes = np.broadcast_to(mask, ptrs.data.shape).astype(bool)  # `&` of one makes integers
        real = self.memory.access(operation, ptrs.data, lanes, num_bytes, values)
        return TensorHandle(real, ptrs.dtype)

    def _require(self, condition: Any, message: str) -> None:
        if not condition.data.all():
            num_false = condition.data.size - np.count_nonzero(condition.data)
            raise self.memory.failure(DeviceAssertion, message, num_false, condition.data.size)


class CheckedReduce(ReduceOps):  # type: ignore[misc]
    memory: Memory

    def sum(self, input: Any) -> Any:
        exact = np.sum(input.handle.data, axis=self.axis, keepdims=self.keep_dims)
        require_no_overflow(self.memory, "sum", exact, input.dtype)
        return self.to_tensor(exact, input.dtype)


class CheckedScan(ScanOps):  # type: ignore[misc]
    memory: Memory

    def cumsum(self, input: Any) -> Any:
        exact = np.cumsum(input.handle.data, axis=self.axis)
        require_no_overflow(self.memory, "cumsum", exact, input.dtype)
        return [self.to_tensor(exact, input.dtype)]


def check_operands(semantic: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """In the place of Triton's own check, which takes ten operations of Triton's."""
    dtype, name = lhs.type.scalar, operation.__name__
    if dtype.int_bitwidth < 64:
        wide = (each.handle.data.astype(np.int64) for each in (lhs, rhs))
        require_no_overflow(semantic.builder.memory, name, EXACT[name](*wide), dtype)


def require_no_overflow(memory: Memory, operation: str, exact: Array, dtype: Any) -> None:
    """exact: what integers of `dtype` would be if they were wider. Of 64 bits nothing is known."""
    if not dtype.is_int() or dtype.int_bitwidth == 64:
        return
    low, high = dtype.get_int_min_value(), dtype.get_int_max_value()
    num_beyond = int(np.count_nonzero((exact < low) | (exact > high)))
    if num_beyond:
        what = f"{dtype} overflows in {operation}"
        raise memory.failure(DeviceAssertion, what, num_beyond, np.size(exact))


def is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def widened(handle: Any) -> Array:
    """bfloat16 as float32, anything else as it is."""
    data: Array = handle.data
    return (data.astype(np.uint32) << 16).view(np.float32) if is_bf16(handle) else data


def rounded(wide: Array) -> Any:
    """A result of bfloat16 operands: a float of bfloat16, a comparison as it is."""
    return TensorHandle(wide if wide.dtype == np.bool_ else to_bf16(wide), tl.bfloat16)


def to_bf16(wide: Array) -> npt.NDArray[np.uint16]:
    """float32 to the bits of the nearest bfloat16, ties to even."""
    bits = wide.astype(np.float32, copy=False).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), BF16_NAN, nearest).astype(np.uint16)


def undefined(ptrs: Any) -> Any:
    dtype = ptrs.get_element_ty()
    value: float = UNDEFINED_INTEGER
    if dtype == tl.bfloat16:
        value = BF16_NAN
    elif dtype.is_floating() and dtype.primitive_bitwidth > 8:
        value = float("nan")
    return TensorHandle(np.full(ptrs.data.shape, value, _get_np_dtype(dtype)), dtype)
