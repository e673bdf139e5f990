"""Linear layers on the GPU: right at hostile sizes and at those of an 8B Llama, the same bits for a
row in any batch where they are asked for, and chosen by time."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from kernels.linear import reference
from kernels.linear.api import (
    LINEARS,
    SILU_MULS,
    Form,
    PackedLinear,
    linear,
    linear_silu_mul,
    multiply,
    pack_linear,
)
from kernels.linear.choose import choose_linears
from tests.kernels.tolerances import DTYPES, FLOAT32_SUM, NARROW_SUM, ROUNDINGS

pytestmark = pytest.mark.gpu


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def weights_of(
    out_size: int,
    in_size: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = True,
    out_dtype: torch.dtype | None = None,
) -> PackedLinear:
    weight = normal(out_size, in_size, dtype=dtype, seed=1) / in_size**0.5
    bias = normal(out_size, dtype=dtype, seed=2) if has_bias else None
    return pack_linear(weight, bias, out_dtype=out_dtype)


def in_float32(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
    return F.linear(x.float(), packed.weight.float(), packed.added.float()).to(x.dtype)


def assert_close_to_float64(came: torch.Tensor, x: torch.Tensor, packed: PackedLinear) -> None:
    """Float32, which was not rounded after the error that any order of its sums has."""
    assert came.dtype == torch.float32
    weight = packed.weight.double()
    expected = F.linear(x.double(), weight, packed.added.double())
    magnitude = F.linear(x.double().abs(), weight.abs(), packed.added.double().abs())
    of_sum = FLOAT32_SUM if x.dtype == torch.float32 else NARROW_SUM
    allowed = ROUNDINGS[came.dtype] * expected.abs() + of_sum * magnitude
    error = (came.double() - expected).abs()
    assert (error <= allowed).all(), (error - allowed).max()


def assert_close(came: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    rtol = roundings * ROUNDINGS[came.dtype]
    torch.testing.assert_close(came, expected, rtol=rtol, atol=rtol / 2)


SIZES = [(2, 3), (7, 33), (520, 40), (1040, 224), (4096, 6144), (14336, 4096)]
# The bundle has bfloat16 at aligned sizes: of the others, which are compiled when they come, a few.
CASES = [(*size, torch.bfloat16) for size in SIZES]
CASES += [(7, 33, torch.float16), (4096, 6144, torch.float16)]


@pytest.mark.parametrize("form", LINEARS, ids=lambda form: form.launch.contract.kernel)
@pytest.mark.parametrize(("in_size", "out_size", "dtype"), CASES)
def test_a_form(form: Form, in_size: int, out_size: int, dtype: torch.dtype) -> None:
    for num_rows in {1, form.max_rows // 2 + 1, form.max_rows}:
        packed = weights_of(out_size, in_size, dtype, has_bias=num_rows > 1)
        x = normal(num_rows, in_size + 16, dtype=dtype)[:, :in_size]

        assert_close(multiply(form, x, packed), in_float32(x, packed))


@pytest.mark.parametrize("form", LINEARS, ids=lambda form: form.launch.contract.kernel)
@pytest.mark.parametrize(("in_size", "out_size", "dtype"), CASES)
def test_a_form_of_float32_products(
    form: Form, in_size: int, out_size: int, dtype: torch.dtype
) -> None:
    for num_rows in {1, form.max_rows // 2 + 1, form.max_rows}:
        packed = weights_of(out_size, in_size, dtype, out_dtype=torch.float32)
        x = normal(num_rows, in_size + 16, dtype=dtype)[:, :in_size]

        assert_close_to_float64(multiply(form, x, packed), x, packed)


@pytest.mark.parametrize("dtype", reference.NARROW)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "in_size", "out_size"), [(1, 2, 3), (3, 7, 33), (65, 200, 70), (300, 4096, 4096)]
)
def test_float32_products_of_any_number_of_rows(
    num_rows: int, in_size: int, out_size: int, dtype: torch.dtype, deterministic: bool
) -> None:
    """By cuBLAS, and by the fixed kernel."""
    for has_bias in (False, True):
        packed = weights_of(out_size, in_size, dtype, has_bias=has_bias, out_dtype=torch.float32)
        x = normal(num_rows, in_size + 16, dtype=dtype)[:, :in_size]

        assert_close_to_float64(linear(x, packed, deterministic=deterministic), x, packed)


@pytest.mark.parametrize("form", SILU_MULS, ids=lambda form: form.launch.contract.kernel)
@pytest.mark.parametrize(("in_size", "size", "dtype"), CASES)
def test_a_form_with_the_activation(
    form: Form, in_size: int, size: int, dtype: torch.dtype
) -> None:
    packed = weights_of(2 * size, in_size, dtype)
    for num_rows in {1, form.max_rows // 2 + 1, form.max_rows}:
        x = normal(num_rows, in_size + 16, dtype=dtype)[:, :in_size]

        gate, up = in_float32(x, packed).chunk(2, dim=-1)

        product = F.silu(gate.float()).to(dtype) * up
        assert_close(multiply(form, x, packed), product, roundings=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "in_size", "out_size"),
    [(1, 2, 3), (3, 7, 33), (65, 200, 70), (300, 4096, 4096), (2, 14336, 4096)],
)
def test_fixed(num_rows: int, in_size: int, out_size: int, dtype: torch.dtype) -> None:
    packed = weights_of(out_size, in_size, dtype)
    x = normal(num_rows, in_size + 16, dtype=dtype)[:, :in_size]

    came = linear(x, packed, deterministic=True)
    if dtype == torch.float32:
        assert_close_to_float64(came, x, packed)
    else:
        assert_close(came, in_float32(x, packed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_size", "out_size"), [(200, 70), (4096, 4096), (14336, 512)])
def test_a_row_has_the_same_bits_in_any_batch(
    in_size: int, out_size: int, dtype: torch.dtype
) -> None:
    packed, x = weights_of(out_size, in_size, dtype), normal(300, in_size, dtype=dtype)
    places = torch.randperm(300, device="cuda")
    fixed = partial(linear, packed=packed, deterministic=True)

    together = fixed(x)

    assert torch.equal(fixed(x[places]), together[places])
    for num_rows in (1, 2, 3, 16, 64, 65, 127, 299):
        for start in (0, 1, 17, 300 - num_rows):
            rows = slice(start, start + num_rows)
            assert torch.equal(fixed(x[rows]), together[rows]), (num_rows, start)


def test_what_is_chosen_is_right_and_was_timed(caplog: pytest.LogCaptureFixture) -> None:
    layers = [weights_of(4096, 4096, torch.bfloat16) for _ in range(8)]
    gate_ups = [weights_of(28672, 4096, torch.bfloat16) for _ in range(2)]
    head = weights_of(32000, 4096, torch.bfloat16, out_dtype=torch.float32)

    with caplog.at_level("INFO"):
        choose_linears([*layers, head], gate_ups)

    assert "linear 4096x4096" in caplog.text
    assert "linear_silu_mul 28672x4096" in caplog.text
    for num_rows in (1, 2, 3, 4, 7, 16, 17, 32, 33):
        x = normal(num_rows, 4096, dtype=torch.bfloat16)
        assert_close(linear(x, layers[0]), in_float32(x, layers[0]))
        assert_close_to_float64(linear(x, head), x, head)
        gate, up = in_float32(x, gate_ups[1]).chunk(2, dim=-1)
        expected = F.silu(gate.float()).to(x.dtype) * up
        assert_close(linear_silu_mul(x, gate_ups[1]), expected, roundings=3)
