"""Small kernels with one planted mistake each, or none, for the checked interpreter to find."""

import torch
import triton
import triton.language as tl

from kernels.checked_interpreter import run_checked
from kernels.contract import Contract, InOut, Output, Scalar, Size, Stride, Tensor
from kernels.kernel import Kernel, kernel

F32 = torch.float32
SIZE = 20  # not a multiple of the block of 16


def declare(function, **arguments) -> Kernel:
    contract = Contract(function.__name__, **arguments)
    return kernel(contract=contract, variants=lambda contract: [])(function)


def copy(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    tl.store(out_ptr + places, tl.load(x_ptr + places, mask=mask), mask=mask)


def load_past(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places <= size)
    tl.store(out_ptr + places, x, mask=places < size)


def load_before(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places - 2, mask=places < size)
    tl.store(out_ptr + places, x, mask=places < size)


def store_unmasked(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + places, tl.load(x_ptr + places, mask=places < size))


def other_argument(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    pointers = tl.where(places < 4, x_ptr + places, out_ptr + places + size)
    x = tl.load(pointers, mask=places < 6)
    tl.store(out_ptr + places, x, mask=places < size)


def store_twice(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size)
    tl.store(out_ptr + tl.arange(0, BLOCK), x)


def shift_in_place(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + (places + 1) % size, mask=places < size)
    tl.store(out_ptr + places, x, mask=places < size)


def shift_down_in_place(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places + 1, mask=places + 1 < size, other=0)
    tl.store(out_ptr + places, x, mask=places < size)


def lanes_meet(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size)
    tl.store(out_ptr + places // 2, x, mask=places < size)


def half_stored(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size // 2
    tl.store(out_ptr + places, tl.load(x_ptr + places, mask=mask), mask=mask)


def read_first(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    x = tl.load(x_ptr + places, mask=mask)
    x += tl.load(out_ptr + places, mask=mask)
    tl.store(out_ptr + places, x, mask=mask)


def store_input(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    x = tl.load(x_ptr + places, mask=mask)
    tl.store(x_ptr + places, -x, mask=mask)
    tl.store(out_ptr + places, x, mask=mask)


def no_other(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x_ptr + places, mask=places < size), 0)
    tl.store(out_ptr + places, tl.zeros([BLOCK], tl.float32) + total, mask=places < size)


def asserts(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    x = tl.load(x_ptr + places, mask=mask)
    tl.device_assert(x > 2, "x is small", mask=mask)
    tl.store(out_ptr + places, x, mask=mask)


@triton.jit
def half_of(place, size):
    return place * size // 2


def overflows(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    far = half_of((places + 1) * 65536, size * 65536)
    tl.store(out_ptr + places, far.to(tl.float32), mask=places < size)


def gathers_before(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size)
    x = tl.gather(x, tl.arange(0, BLOCK) - 2, 0)
    tl.store(out_ptr + places, x, mask=places < size)


def sum_overflows(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(places + (1 << 28), 0)
    tl.store(out_ptr + places, places + total.to(tl.float32), mask=places < size)


def cumsum_overflows(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    totals = tl.cumsum(places + (1 << 28), 0)
    tl.store(out_ptr + places, totals.to(tl.float32), mask=places < size)


def sums(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Of integers and floats: 0 where both are right."""
    places = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size, other=0)
    total = tl.sum(x, 0) - tl.sum(x.to(tl.int32), 0)
    difference = tl.cumsum(x, 0) - tl.cumsum(x.to(tl.int32), 0)
    tl.store(out_ptr + places, difference + total, mask=places < size)


def of_no_argument(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    nowhere = (places.to(tl.int64) + 64).to(tl.pointer_type(tl.float32), bitcast=True)
    x = tl.load(nowhere, mask=places < size)
    tl.store(out_ptr + places, x, mask=places < size)


def between_elements(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    odd = x_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + 1 + places * 2
    pointers = odd.to(tl.pointer_type(tl.float32), bitcast=True)
    x = tl.load(pointers, mask=places < size)
    tl.store(out_ptr + places, x, mask=places < size)


def in_halves(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """Through pointers to 16 bits: the halves of a float32 are its own, and no more."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = x_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    target = out_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    mask = places < size * 2
    tl.store(target + places, tl.load(source + places, mask=mask), mask=mask)


def block_pointers(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    start = (tl.program_id(0) * BLOCK,)
    x = tl.make_block_ptr(x_ptr, (size,), (1,), start, (BLOCK,), (0,))
    out = tl.make_block_ptr(out_ptr, (size,), (1,), start, (BLOCK,), (0,))
    tl.store(out, tl.load(x, boundary_check=(0,)), boundary_check=(0,))


def block_pointer_unchecked(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    start = (tl.program_id(0) * BLOCK,)
    x = tl.make_block_ptr(x_ptr, (size,), (1,), start, (BLOCK,), (0,))
    out = tl.make_block_ptr(out_ptr, (size,), (1,), start, (BLOCK,), (0,))
    tl.store(out, tl.load(x), boundary_check=(0,))


def descriptors(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [size], [1], [BLOCK])
    out = tl.make_tensor_descriptor(out_ptr, [size], [1], [BLOCK])
    out.store([tl.program_id(0) * BLOCK], x.load([tl.program_id(0) * BLOCK]))


def descriptor_too_long(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [size + 1], [1], [BLOCK])
    out = tl.make_tensor_descriptor(out_ptr, [size], [1], [BLOCK])
    start = tl.program_id(0) * BLOCK
    out.store([start], x.load([start]))  # too long


def count(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + places, mask=places < size, other=0), 0))


def count_past(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_max(out_ptr + places, tl.load(x_ptr + places, mask=places < size, other=0))


def count_and_store(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size, other=0)
    if tl.program_id(0) == 0:
        tl.store(out_ptr, 0.0)
    tl.atomic_add(out_ptr, tl.sum(x, 0))


def swap(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    tl.atomic_cas(out_ptr + size + tl.program_id(0), 0, 1)


def rows(x_ptr, out_ptr, x_stride, size, BLOCK: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + places, mask=places < size)
    tl.store(out_ptr + row * size + places, x, mask=places < size)


def rows_too_wide(x_ptr, out_ptr, x_stride, size, BLOCK: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + places, mask=places < size + 1)
    tl.store(out_ptr + row * size + places, x, mask=places < size)


def scaled(x_ptr, out_ptr, size, scale, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size)
    tl.store(out_ptr + places, x.to(tl.float32) * (scale + 1), mask=places < size)


def cast(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size)
    tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty), mask=places < size)


def square_and_add(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """In the dtype of x."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < size)
    tl.store(out_ptr + places, tl.where(x > 1, x * x + x, -x), mask=places < size)


def product(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + places)
    tl.store(out_ptr + places, tl.dot(x, x.T))


def fails_in_python(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 16, "BLOCK is too small")


PAIR = {"x": Tensor("size"), "out": Output("size"), "size": Size("size")}
ONE_DTYPE = {"x": Tensor("size"), "out": Output("size", like="x"), "size": Size("size")}
SQUARE = {"x": Tensor("16 16"), "out": Output("size size"), "size": Size("size")}
SCALED = {
    "x": Tensor("size", F32),
    "out": Output("size", F32),
    "size": Size("size"),
    "scale": Scalar(float),
}
VECTOR = {"x": Tensor("size", F32), "out": Output("size", F32), "size": Size("size")}
IN_PLACE = VECTOR | {"out": Output("size", F32, in_place=("x",))}
PARTIAL = VECTOR | {"out": InOut("size", F32)}
SUM = VECTOR | {"out": InOut("1", F32)}
SUM_OF_INTEGERS = {
    "x": Tensor("size", torch.int32),
    "out": InOut("size", torch.int32),
    "size": Size("size"),
}
MATRIX = {
    "x": Tensor("rows size", F32, layout="rows", align=4),
    "out": Output("rows size", F32),
    "x_stride": Stride("x", 0),
    "size": Size("size"),
}


def launch(name: str, contract: dict, grid: tuple[int, ...], *arguments: object) -> None:
    run_checked(declare(globals()[name], **contract), grid, arguments, {"BLOCK": 16})


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
