"""What a launch must look like: one `Contract` per kernel, checked before every launch.

    CONTRACT = Contract(
        "silu_mul",
        gate_up=Tensor("rows 2*size", FLOATS, layout="rows"),
        out=Output("rows size", like="gate_up"),
        gate_up_stride=Stride("gate_up", 0),
        size=Size("size"),
    )

A shape is a list of named dimensions; a name stands for one number in the whole launch. The names
and their order are those of the kernel's parameters. What depends on shapes, strides, dtypes and
devices is checked once per combination and remembered; addresses and scalars, every time.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kernels.errors import ContractError
from kernels.extent import is_same, lie_in_rows_apart, overlaps_itself, span_of
from kernels.unrolled import Check, unrolled

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INT32_MAX = 2**31 - 1
MAX_REMEMBERED = 4096

Expected = tuple[tuple[int, ...], tuple[int, ...]]
Layout = Literal["contiguous", "rows", "strided"]


@dataclass(frozen=True)
class Dim:
    """`2*size`: a multiple of a named number, or (name None) the number itself."""

    factor: int
    name: str | None

    @classmethod
    def parse(cls, text: str) -> "Dim":
        match = re.fullmatch(r"(?:(\d+)\*)?([a-z_]+)|(\d+)", text)
        if match is None:
            raise TypeError(f"{text!r} is no dimension: size, 2*size or 3 are")
        factor, name, number = match.groups()
        return cls(int(number or factor or 1), name)

    def __str__(self) -> str:
        parts = ([] if self.factor == 1 and self.name else [str(self.factor)]) + [self.name or ""]
        return "*".join(part for part in parts if part)


@dataclass(frozen=True)
class Tensor:
    """An argument the kernel reads.

    layout: "contiguous"; "rows": the last dimension is, the others have any strides; "strided".
    align: bytes that divide the address.
    row_align: bytes that divide the strides of "rows".
    wide_index: the kernel computes its offsets in int64, so that 2^31 elements are not too many.
    """

    shape: str
    dtype: torch.dtype | Sequence[torch.dtype] | None = None
    like: str | None = None  # has the dtype of that argument
    layout: Layout = "contiguous"
    align: int = 16
    row_align: int = 1
    wide_index: bool = False

    is_stored = False
    is_whole = False

    @property
    def dims(self) -> tuple[Dim, ...]:
        return tuple(Dim.parse(text) for text in self.shape.split())

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        if self.dtype is None:
            return ()
        return (self.dtype,) if isinstance(self.dtype, torch.dtype) else tuple(self.dtype)


@dataclass(frozen=True)
class Output(Tensor):
    """An argument the kernel stores every element of, and reads none that it has not stored.

    in_place: arguments that may be this very tensor: same address, shape and strides.
    """

    in_place: tuple[str, ...] = ()

    is_stored = True
    is_whole = True


@dataclass(frozen=True)
class InOut(Output):
    """An argument the kernel stores some elements of, and may read."""

    is_whole = False


@dataclass(frozen=True)
class Size:
    """A scalar that is the dimension `name`."""

    name: str


@dataclass(frozen=True)
class Count(Size):
    """A dimension that no address is a multiple of, such as the number of rows: a kernel gains
    nothing where 16 divides it, so the choice of a variant, and with it a row's bits, does not
    depend on it."""


@dataclass(frozen=True)
class Stride:
    """A scalar that is the stride of `tensor` in `axis`, in elements."""

    tensor: str
    axis: int


@dataclass(frozen=True)
class Scalar:
    """A number of the caller's own, from `low` to `high`: int32 or float32 on the GPU."""

    kind: type[int] | type[float]
    low: float = float("-inf")
    high: float = float("inf")


Argument = Tensor | Size | Stride | Scalar


class Contract:
    def __init__(self, kernel: str, **arguments: Argument) -> None:
        self.kernel = kernel
        self.tensors = {n: a for n, a in arguments.items() if isinstance(a, Tensor)}
        self.scalars = {n: a for n, a in arguments.items() if not isinstance(a, Tensor)}
        self.names = (*self.tensors, *self.scalars)
        if self.names != tuple(arguments):
            raise TypeError(f"{kernel}: a contract names its tensors first, then its scalars")
        self._check_names()
        self._steps = tuple(
            index
            for index, argument in enumerate(arguments.values())
            if isinstance(argument, Size | Stride) and not isinstance(argument, Count)
        )
        self._free_scalars = tuple(
            (len(self.tensors) + index, name, scalar)
            for index, (name, scalar) in enumerate(self.scalars.items())
            if isinstance(scalar, Scalar)
        )
        self._implied_at = [
            index
            for index, scalar in enumerate(self.scalars.values(), len(self.tensors))
            if not isinstance(scalar, Scalar)
        ]
        self._remembered: dict[Any, Expected] = {}
        self.latest: tuple[Any, Expected | None] = (None, None)
        self.check = unrolled(
            self,
            [each.align for each in self.tensors.values()],
            [self._is_contiguous(name) for name in self.tensors],
            self._implied_at,
            [(index, scalar) for index, _, scalar in self._free_scalars],
            self._beside_stored(),
        )

    check: Check
    """Of a launch: its tensors and scalars in the contract's order. Raises ContractError."""

    @property
    def steps(self) -> tuple[str, ...]:
        """The scalars that addresses are multiples of: sizes and strides, counts apart."""
        return tuple(self.names[index] for index in self._steps)

    def is_aligned(self, arguments: Sequence[Any]) -> bool:
        """Whether 16 divides every step of a launch: its variant is the aligned one."""
        return all(arguments[index] % 16 == 0 for index in self._steps)

    def check_without_programs(self, *arguments: Any) -> None:
        """Of a launch whose grid is empty: it leaves no element of an output as it came."""
        for (name, tensor), value in zip(self.tensors.items(), arguments, strict=False):
            if tensor.is_whole and value.numel():
                self._fail("the grid", f"of some programs, for {name} has elements", "none")

    def _check_names(self) -> None:
        """Of the declaration: what it refers to is there. Raises TypeError."""
        dims = {dim.name for each in self.tensors.values() for dim in each.dims}
        seen: list[str] = []
        for name, tensor in self.tensors.items():
            if tensor.like is not None and tensor.like not in seen:
                raise TypeError(f"{self.kernel}: {name} is like {tensor.like}, no tensor before it")
            if isinstance(tensor, Output) and not set(tensor.in_place) <= set(self.tensors):
                raise TypeError(
                    f"{self.kernel}: {name} is in place of {tensor.in_place}: no tensor"
                )
            if tensor.align < 1 or tensor.align & (tensor.align - 1):
                raise TypeError(
                    f"{self.kernel}: {name} is aligned to {tensor.align}: no power of 2"
                )
            if tensor.layout == "rows" and not tensor.dims:
                raise TypeError(f"{self.kernel}: {name} has no dimension: it cannot have rows")
            seen.append(name)
        for name, scalar in self.scalars.items():
            if isinstance(scalar, Size) and scalar.name not in dims:
                raise TypeError(f"{self.kernel}: {name} is the size {scalar.name}: no dimension")
            if isinstance(scalar, Stride) and (
                scalar.tensor not in self.tensors
                or not 0 <= scalar.axis < len(self.tensors[scalar.tensor].dims)
            ):
                where = f"{scalar.tensor} in axis {scalar.axis}"
                raise TypeError(f"{self.kernel}: {name} is the stride of {where}: there is none")

    def _beside_stored(self) -> list[tuple[int, int]]:
        """Each stored tensor beside those that are only read, and the stored ones after it."""
        tensors = list(self.tensors.values())
        return [
            (stored, other)
            for stored, tensor in enumerate(tensors)
            for other, each in enumerate(tensors)
            if tensor.is_stored and (other > stored or not each.is_stored)
        ]

    def _is_contiguous(self, name: str) -> bool:
        """And no scalar is a stride of it."""
        strides = [each for each in self.scalars.values() if isinstance(each, Stride)]
        return self.tensors[name].layout == "contiguous" and all(s.tensor != name for s in strides)

    def expected_of(self, forms: Any, arguments: Sequence[Any]) -> Expected:
        """The scalars that shapes and strides imply, and the bytes that each tensor spans. forms:
        of the tensors. Raises ContractError."""
        expected = self._remembered.get(forms)
        if expected is None:
            expected = self.check_forms(arguments)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[forms] = expected
        self.latest = forms, expected
        return expected

    def check_forms(self, arguments: Sequence[Any]) -> Expected:
        """As `expected_of`, of forms that are not remembered."""
        named = dict(zip(self.names, arguments, strict=True))
        sizes: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            self._check_kind(name, tensor, named)
            self._bind_shape(name, tensor, named[name].shape, sizes)
            self._check_layout(name, tensor, named[name])
        implied = (self.scalars[self.names[index]] for index in self._implied_at)
        tensors = [named[name] for name in self.tensors]
        return (
            tuple(self._implied(scalar, named, sizes) for scalar in implied),
            tuple(span_of(each) * each.element_size() for each in tensors),
        )

    def _check_kind(self, name: str, tensor: Tensor, named: dict[str, Any]) -> None:
        value = named[name]
        if not isinstance(value, torch.Tensor):
            self._fail(name, "a tensor", type(value).__name__)
        if value.layout is not torch.strided:
            self._fail(name, "a dense tensor", short(value.layout))
        if tensor.dtypes and value.dtype not in tensor.dtypes:
            self._fail(name, " or ".join(map(short, tensor.dtypes)), short(value.dtype))
        if tensor.like is not None and value.dtype != named[tensor.like].dtype:
            expected = f"{short(named[tensor.like].dtype)} like {tensor.like}"
            self._fail(name, expected, short(value.dtype))
        self._check_device(name, value, named[next(iter(self.tensors))])

    def check_devices(self, arguments: Sequence[Any]) -> None:
        """Of tensors on devices of one number. Raises ContractError."""
        for name, value in zip(self.tensors, arguments, strict=False):
            self._check_device(name, value, arguments[0])

    def _check_device(self, name: str, value: torch.Tensor, like: torch.Tensor) -> None:
        if value.device != like.device:
            self._fail(name, f"on {like.device} like {self.names[0]}", str(value.device))

    def _bind_shape(
        self, name: str, tensor: Tensor, shape: torch.Size, sizes: dict[str, int]
    ) -> None:
        """Each named dimension takes its number where it is met first."""
        came = f"{list(shape)}"
        if len(shape) != len(tensor.dims):
            self._fail(name, f"[{tensor.shape}] of {len(tensor.dims)} dimensions", came)
        for dim, length in zip(tensor.dims, shape, strict=True):
            if dim.name is not None and dim.name not in sizes and length % dim.factor == 0:
                sizes[dim.name] = length // dim.factor
            expected = dim.factor * (sizes.get(dim.name, -1) if dim.name else 1)
            if length != expected:
                known = {d.name: sizes[d.name] for d in tensor.dims if d.name in sizes}
                where = ", ".join(f"{key} = {value}" for key, value in known.items())
                self._fail(name, f"[{tensor.shape}]" + (f" where {where}" if where else ""), came)

    def _check_layout(self, name: str, tensor: Tensor, value: torch.Tensor) -> None:
        strides = f"strides {value.stride()} of {list(value.shape)}"
        if tensor.layout == "contiguous" and not value.is_contiguous():
            self._fail(name, "contiguous", strides)
        if tensor.layout == "rows":
            if value.shape[-1] > 1 and value.stride(-1) != 1:
                self._fail(name, "contiguous in its last dimension", strides)
            rows = value.stride()[:-1]
            if any(stride * value.element_size() % tensor.row_align for stride in rows):
                expected = f"of rows that start at multiples of {tensor.row_align} bytes"
                self._fail(name, expected, strides)
        if tensor.is_stored and overlaps_itself(value):
            self._fail(name, "of elements that lie apart, for it is stored", strides)
        if not tensor.wide_index and span_of(value) > INT32_MAX:
            expected = f"of at most {INT32_MAX} elements, for its offsets are int32"
            self._fail(name, expected, f"{span_of(value)}")

    def _implied(self, scalar: Argument, named: dict[str, Any], sizes: dict[str, int]) -> int:
        if isinstance(scalar, Size):
            return sizes[scalar.name]
        assert isinstance(scalar, Stride)
        stride: int = named[scalar.tensor].stride(scalar.axis)
        return stride

    def check_free(self, arguments: Sequence[Any]) -> None:
        """Of the caller's own scalars. Raises ContractError."""
        for index, name, scalar in self._free_scalars:
            value = arguments[index]
            if isinstance(value, bool) or not isinstance(value, scalar.kind):
                self._fail(name, f"of type {scalar.kind.__name__}", f"{value!r}")
            if not scalar.low <= value <= scalar.high:
                self._fail(name, f"from {scalar.low} to {scalar.high}", f"{value!r}")

    def check_overlap(self, arguments: Sequence[Any], stored: int, other: int) -> None:
        """Of two tensors whose spans overlap. Raises ContractError."""
        names = list(self.tensors)
        declared = self.tensors[names[stored]]
        may_be_same = isinstance(declared, Output) and names[other] in declared.in_place
        one, two = arguments[stored], arguments[other]
        if (may_be_same and is_same(one, two)) or lie_in_rows_apart(one, two):
            return
        expected = f"apart from {names[other]} in memory, for it is stored"
        if may_be_same:
            expected += f" (or be {names[other]} itself)"
        self._fail(names[stored], expected, f"an overlap from {one.data_ptr():#x} on")

    def refuse_count(self, arguments: Sequence[Any]) -> None:
        self._fail("the arguments", " ".join(self.names), f"{len(arguments)} values")

    def refuse_align(self, arguments: Sequence[Any]) -> None:
        for name, tensor, value in zip(
            self.tensors, self.tensors.values(), arguments, strict=False
        ):
            start = value.data_ptr()
            if start % tensor.align:
                self._fail(name, f"aligned to {tensor.align} bytes", f"the address {start:#x}")

    def refuse_scalars(self, arguments: Sequence[Any], expected: Sequence[int]) -> None:
        for index, value in zip(self._implied_at, expected, strict=True):
            if arguments[index] != value or type(arguments[index]) is not int:
                self._fail_scalar(index, value, arguments[index])

    def _fail_scalar(self, index: int, expected: int, came: Any) -> None:
        name = self.names[index]
        scalar = self.scalars[name]
        if isinstance(scalar, Stride):
            meaning = f"the stride of {scalar.tensor} in axis {scalar.axis}"
        else:
            assert isinstance(scalar, Size)
            meaning = f"the size {scalar.name}"
        self._fail(name, f"{expected}, {meaning}", f"{came!r}")

    def _fail(self, argument: str, expected: str, came: str) -> None:
        raise ContractError(self.kernel, argument, expected, came)


def short(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")
