"""Each planted mistake is named: kernel, argument, index, lanes, program, statement."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime import interpreter

from kernels.checked_interpreter import (
    assert_equals_reference,
    checked,
    require_interpreter,
)
from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    KernelError,
    OutOfBounds,
    StoredInput,
    Uninitialised,
    UnsupportedTriton,
)
from kernels.silu_mul import reference
from kernels.silu_mul.api import silu_mul
from tests.kernels import planted
from tests.kernels.planted import SIZE, launch, seeded

pytestmark = pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")


def launch_vector(name: str, grid: int = 2, contract: dict = planted.VECTOR) -> torch.Tensor:
    x, out = torch.arange(1.0, SIZE + 1), torch.empty(SIZE)
    launch(name, contract, (grid,), x, out, SIZE)
    return out


def place(text: str) -> str:
    """`file:line: text` of a statement of the planted kernels."""
    lines = Path(planted.__file__).read_text().splitlines()
    (line,) = [number for number, each in enumerate(lines, 1) if each.strip() == text]
    return f"tests/kernels/planted.py:{line}: {text}"


MESSAGES = [
    (
        "load_past",
        OutOfBounds,
        """\
        load_past: load of x out of bounds
          offset 20, index [20] of shape [20] with strides [1], 1 past its last element
          1 of 16 lanes, program (1, 0, 0)
          x = tl.load(x_ptr + places, mask=places <= size)""",
    ),
    (
        "load_before",
        OutOfBounds,
        """\
        load_before: load of x out of bounds
          offset -2 of shape [20] with strides [1], 2 before its first element
          2 of 16 lanes, program (0, 0, 0)
          x = tl.load(x_ptr + places - 2, mask=places < size)""",
    ),
    (
        "store_unmasked",
        OutOfBounds,
        """\
        store_unmasked: store of out out of bounds
          offset 20, index [20] of shape [20] with strides [1], 1 past its last element
          12 of 16 lanes, program (1, 0, 0)
          tl.store(out_ptr + places, tl.load(x_ptr + places, mask=places < size))""",
    ),
    (
        "other_argument",
        OutOfBounds,
        """\
        other_argument: load of out out of bounds
          offset 24, index [24] of shape [20] with strides [1], 5 past its last element
          2 of 16 lanes, program (0, 0, 0)
          x = tl.load(pointers, mask=places < 6)""",
    ),
    (
        "of_no_argument",
        OutOfBounds,
        """\
        of_no_argument: load at an address that is derived from no argument
          16 of 16 lanes, program (0, 0, 0)
          x = tl.load(nowhere, mask=places < size)""",
    ),
    (
        "between_elements",
        OutOfBounds,
        """\
        between_elements: load of x at an address that 4 does not divide
          2 bytes from its first element
          16 of 16 lanes, program (0, 0, 0)
          x = tl.load(pointers, mask=places < size)""",
    ),
    (
        "store_twice",
        DoubleStore,
        """\
        store_twice: store of out where program (0, 0, 0) stored
          index [0] of shape [20]
          16 of 16 lanes, program (1, 0, 0)
          tl.store(out_ptr + tl.arange(0, BLOCK), x)""",
    ),
    (
        "lanes_meet",
        DoubleStore,
        """\
        lanes_meet: store of out by lanes that meet and differ
          index [0] of shape [20]
          8 of 16 lanes, program (0, 0, 0)
          tl.store(out_ptr + places // 2, x, mask=places < size)""",
    ),
    (
        "half_stored",
        Uninitialised,
        """\
        half_stored: 10 of 20 elements of out were never stored
          the first at index [10] of shape [20]; the grid was (2, 1, 1)""",
    ),
    (
        "read_first",
        Uninitialised,
        """\
        read_first: load of out before it was stored
          index [0] of shape [20]
          16 of 16 lanes, program (0, 0, 0)
          x += tl.load(out_ptr + places, mask=mask)""",
    ),
    (
        "store_input",
        StoredInput,
        """\
        store_input: store into x, which its contract says is only read
          16 of 16 lanes, program (0, 0, 0)
          tl.store(x_ptr + places, -x, mask=mask)""",
    ),
    (
        "asserts",
        DeviceAssertion,
        """\
        asserts: device_assert failed: x is small
          2 of 16 lanes, program (0, 0, 0)
          tl.device_assert(x > 2, "x is small", mask=mask)""",
    ),
    (
        "overflows",
        DeviceAssertion,
        """\
        overflows: int32 overflows in mul
          16 of 16 lanes, program (0, 0, 0)
          return place * size // 2""",
    ),
    (
        "gathers_before",
        OutOfBounds,
        """\
        gathers_before: gather at index -2 of 16 lanes
          2 of 16 lanes, program (0, 0, 0)
          x = tl.gather(x, tl.arange(0, BLOCK) - 2, 0)""",
    ),
    (
        "sum_overflows",
        DeviceAssertion,
        """\
        sum_overflows: int32 overflows in sum
          1 of 1 lanes, program (0, 0, 0)
          total = tl.sum(places + (1 << 28), 0)""",
    ),
    (
        "cumsum_overflows",
        DeviceAssertion,
        """\
        cumsum_overflows: int32 overflows in cumsum
          9 of 16 lanes, program (0, 0, 0)
          totals = tl.cumsum(places + (1 << 28), 0)""",
    ),
    (
        "block_pointer_unchecked",
        OutOfBounds,
        """\
        block_pointer_unchecked: load of x out of bounds
          offset 20, index [20] of shape [20] with strides [1], 1 past its last element
          12 of 16 lanes, program (1, 0, 0)
          tl.store(out, tl.load(x), boundary_check=(0,))""",
    ),
    (
        "descriptor_too_long",
        OutOfBounds,
        """\
        descriptor_too_long: load of x out of bounds
          offset 20, index [20] of shape [20] with strides [1], 1 past its last element
          1 of 16 lanes, program (1, 0, 0)
          out.store([start], x.load([start]))  # too long""",
    ),
]


def golden(text: str) -> str:
    """The last line of three or more is a statement of the planted kernels."""
    *lines, last = textwrap.dedent(text).splitlines()
    if len(lines) > 1:
        last = f"  {place(last.strip())}"
    return "\n".join([*lines, last])


@pytest.mark.parametrize(("name", "kind", "text"), MESSAGES, ids=[each[0] for each in MESSAGES])
def test_a_mistake_is_named(name, kind, text):
    with pytest.raises(kind) as failure:
        launch_vector(name)
    assert str(failure.value) == golden(text)
    assert type(failure.value) is kind


@pytest.mark.parametrize("name", ["copy", "block_pointers", "descriptors"])
def test_a_right_kernel_passes(name):
    assert launch_vector(name).tolist() == list(range(1, SIZE + 1))


def test_a_narrower_pointer_is_followed():
    assert launch_vector("in_halves", grid=3).tolist() == list(range(1, SIZE + 1))


def test_an_element_between_rows_is_not_the_arguments():
    x, out = torch.randn(3, 8)[:, :5], torch.empty(3, 5)
    launch("rows", planted.MATRIX, (3,), x, out, 8, 5)
    assert torch.equal(out, x)

    with pytest.raises(OutOfBounds) as failure:
        launch("rows_too_wide", planted.MATRIX, (3,), x, out, 8, 5)

    assert str(failure.value) == golden(
        """\
        rows_too_wide: load of x out of bounds
          offset 5, index [0, 5] of shape [3, 5] with strides [8, 1], between its rows
          1 of 16 lanes, program (0, 0, 0)
          x = tl.load(x_ptr + row * x_stride + places, mask=places < size + 1)"""
    )


def test_an_expanded_input_is_read_many_times():
    x, out = torch.randn(1, 5).expand(3, 5), torch.empty(3, 5)
    launch("rows", planted.MATRIX, (3,), x, out, 0, 5)
    assert torch.equal(out, x)


def test_rows_in_any_order_of_strides():
    x = torch.randn(4, 3, 8).transpose(0, 1)[:, 2, :5]  # [3, 5], rows of a deeper tensor
    out = torch.empty(3, 5)
    launch("rows", planted.MATRIX, (3,), x, out, x.stride(0), 5)
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shift_in_place", "load of x where program (0, 0, 0) stored"),
        ("shift_down_in_place", "store of out where program (0, 0, 0) loaded"),
    ],
)
def test_programs_of_an_op_in_place_do_not_read_what_others_store(name, message):
    x = torch.arange(SIZE, dtype=torch.float32)
    with pytest.raises(DoubleStore, match=name) as failure:
        launch(name, planted.IN_PLACE, (2,), x, x, SIZE)
    assert str(failure.value).splitlines()[0] == f"{name}: {message}"


@pytest.mark.parametrize("name", ["shift_in_place", "shift_down_in_place"])
def test_what_races_in_place_is_right_beside(name):
    launch_vector(name, contract=planted.IN_PLACE)


def test_in_place_is_not_poisoned():
    x = torch.arange(SIZE, dtype=torch.float32)
    launch("copy", planted.IN_PLACE, (2,), x, x, SIZE)
    assert x.tolist() == list(range(SIZE))


def test_atomics_of_many_programs_are_no_race():
    x, out = torch.arange(SIZE, dtype=torch.float32), torch.zeros(1)
    launch("count", planted.SUM, (2,), x, out, SIZE)
    assert out.item() == SIZE * (SIZE - 1) / 2


def test_an_atomic_on_what_another_program_stored_is_a_race():
    with pytest.raises(DoubleStore, match=r"atomic of out where program \(0, 0, 0\) stored"):
        launch("count_and_store", planted.SUM, (2,), torch.ones(SIZE), torch.zeros(1), SIZE)


def test_an_atomic_on_an_output_reads_it_before_it_was_stored():
    contract = planted.SUM | {"out": planted.Output("1", planted.F32)}
    with pytest.raises(Uninitialised, match="atomic of out before it was stored"):
        launch("count", contract, (2,), torch.ones(SIZE), torch.zeros(1), SIZE)


def test_an_atomic_that_the_interpreter_lacks_is_refused_by_name():
    contract = planted.SUM | {"out": planted.InOut("1", torch.bfloat16)}
    with pytest.raises(KernelError, match=r"count: an atomic of bfloat16 .*float32\n  .*planted"):
        launch("count", contract, (2,), torch.ones(SIZE), torch.zeros(1).bfloat16(), SIZE)


@pytest.mark.parametrize("name", ["count_past", "swap"])
def test_atomics_are_checked(name):
    x, out = torch.arange(SIZE, dtype=torch.int32), torch.zeros(SIZE, dtype=torch.int32)
    with pytest.raises(OutOfBounds, match="atomic of out out of bounds"):
        launch(name, planted.SUM_OF_INTEGERS, (2,), x, out, SIZE)


def test_a_masked_lane_without_other_is_not_zero():
    x, out = torch.ones(10), torch.empty(10)
    launch("no_other", planted.VECTOR, (1,), x, out, 10)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_what_is_not_stored_is_seen(dtype):
    x, out = torch.ones(SIZE, dtype=dtype), torch.ones(SIZE, dtype=dtype)
    with pytest.raises(Uninitialised):
        launch("half_stored", planted.ONE_DTYPE, (2,), x, out, SIZE)
    assert not (out[10:] == 1).any()
    assert (out[:10] == 1).all()


def test_partial_stores_into_an_inout_are_fine():
    x, out = torch.ones(SIZE), torch.zeros(SIZE)
    launch("half_stored", planted.PARTIAL, (2,), x, out, SIZE)
    assert out.tolist() == [1.0] * 10 + [0.0] * 10


def test_the_contract_is_checked_first():
    with pytest.raises(ContractError, match="copy: size must be 20"):
        launch("copy", planted.VECTOR, (2,), torch.ones(SIZE), torch.empty(SIZE), SIZE + 1)


def test_an_empty_grid_runs_nothing_and_must_have_nothing_to_store():
    launch("store_input", planted.VECTOR, (2, 0), torch.ones(0), torch.empty(0), 0)
    launch("half_stored", planted.PARTIAL, (0,), torch.ones(SIZE), torch.empty(SIZE), SIZE)
    with pytest.raises(ContractError) as failure:
        launch("copy", planted.VECTOR, (0,), torch.ones(SIZE), torch.empty(SIZE), SIZE)
    assert str(failure.value) == (
        "copy: the grid must be of some programs, for out has elements, came none"
    )


def test_another_error_says_in_which_program():
    with pytest.raises(AssertionError, match="BLOCK is too small") as failure:
        launch_vector("fails_in_python")
    assert failure.value.__notes__ == ["in program (0, 0, 0) of kernel fails_in_python"]


def test_only_tensors_on_the_cpu():
    x = torch.empty(SIZE, device="meta")
    with pytest.raises(KernelError, match="takes tensors on the CPU, x is on meta"):
        launch("copy", planted.IN_PLACE, (2,), x, x, SIZE)


def test_ops_run_their_kernels_within():
    gate_up = torch.randn(3, 126, generator=seeded()).bfloat16()
    assert_equals_reference(silu_mul, reference.silu_mul, gate_up, rtol=2**-7, atol=1e-6)
    with pytest.raises(AssertionError):
        assert_equals_reference(silu_mul, lambda gate_up: gate_up[:, :63], gate_up)


@pytest.mark.parametrize("name", ["copy", "load_past", "fails_in_python"])
def test_the_interpreter_is_put_back(name):
    def state() -> dict:
        builder = vars(interpreter.interpreter_builder)
        language = vars(triton.language) | vars(triton.language.core)
        return (
            language
            | vars(interpreter)
            | {"class": type(interpreter.interpreter_builder), "builder": dict(builder)}
        )

    before = state()
    try:
        launch_vector(name)
    except (KernelError, AssertionError):
        assert name != "copy"
    assert state() == before


def test_an_unknown_triton_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    with pytest.raises(UnsupportedTriton) as failure, checked():
        pass
    assert str(failure.value) == (
        "the checked interpreter knows the interpreters of triton 3.6 and 3.7, this is 3.9.0: "
        "install one of those, or read the new one, run tests/kernels with it and add it to "
        "KNOWN_TRITON"
    )


def test_a_triton_that_was_imported_to_compile_is_refused():
    code = "from kernels.checked_interpreter import checked\nwith checked(): pass"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "kernels.errors.UnsupportedTriton: triton was imported to compile: "
        "set TRITON_INTERPRET=1 before triton is imported"
    )


def test_this_triton_is_known():
    require_interpreter()
