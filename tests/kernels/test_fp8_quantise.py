import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.fp8_quantise import reference
from kernels.fp8_quantise.api import fp8_quantise
from tests.kernels.launches import assert_bundled
from tests.kernels.tolerances import DTYPES


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_value() -> torch.Tensor:
    """All finite float8_e4m3fn, in float64, ascending."""
    bits = torch.arange(256, dtype=torch.uint8)
    values = bits.view(torch.float8_e4m3fn).double()
    return values[~values.isnan()].unique()


def scaled_by_one(values: torch.Tensor) -> torch.Tensor:
    """One row of them whose scale is 1."""
    return torch.cat((values, torch.tensor([448.0])))[None]


def assert_exact(x: torch.Tensor) -> None:
    assert_equals_reference(fp8_quantise, reference.fp8_quantise, x)


def test_each_value_is_the_nearest_one_and_half_way_the_even_one() -> None:
    values = every_value()
    between = (values[1:] + values[:-1]) / 2
    x = torch.cat((values, between, between * (1 + 1e-6), between * (1 - 1e-6))).float()

    quantised, scales = fp8_quantise(scaled_by_one(x))

    assert scales.item() == 1.0
    came = quantised[0, :-1].double()
    distances = (x.double()[:, None] - values).abs()
    assert torch.equal((came - x.double()).abs(), distances.amin(dim=1))
    is_tied = (distances == distances.amin(dim=1, keepdim=True)).sum(dim=1) == 2
    assert is_tied.sum() == len(between)
    bits = quantised[0, :-1][is_tied].view(torch.uint8)
    assert bits.remainder(2).eq(0).all()


def test_the_kernel_rounds_every_value_and_what_lies_between_alike() -> None:
    values = every_value()
    steps = torch.linspace(0, 1, 33, dtype=torch.float64)[:, None]
    between = values[:-1] + steps * (values[1:] - values[:-1])
    nearly = torch.cat((between * (1 + 1e-7), between * (1 - 1e-7)))

    assert_exact(scaled_by_one(torch.cat((between, nearly)).flatten().float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 63), (1, 576), (3, 1024), (2, 1025), (0, 64)])
def test_the_kernel_equals_its_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_exact(3 * normal(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_wider_matrix_and_of_unequal_size(dtype: torch.dtype) -> None:
    powers = torch.logspace(-6, 4, 11)[:, None]

    assert_exact((normal(11, 80) * powers).to(dtype)[:, :48])


def test_a_row_is_within_half_a_step_of_itself() -> None:
    x = normal(64, 512)

    quantised, scales = fp8_quantise(x)

    error = quantised.double() * scales[:, None].double() - x.double()
    assert (error.abs() <= x.abs() / 16 + scales[:, None] * 2**-10 * 1.001).all()
    assert quantised.float().abs().amax(dim=1).eq(448).all()
    torch.testing.assert_close(scales, x.abs().amax(dim=1) / 448, rtol=1e-7, atol=0)


@pytest.mark.parametrize("size", [1e-45, 1e-38, 5.2e-36, 0.0])
def test_a_row_too_small_for_a_scale_is_zero(size: float) -> None:
    x = torch.full((2, 5), size)
    x[1] = -3.0

    quantised, scales = fp8_quantise(x)

    assert torch.equal(scales, torch.tensor([1.0, 3.0 / 448]))
    assert quantised[0].float().eq(0).all()
    assert_exact(x)


def test_the_largest_and_the_smallest_rows_are_neither_lost_nor_infinite() -> None:
    x = torch.tensor([[3.4e38, -1e38, 2e37], [5.3e-36, -1e-36, 0.0]])

    quantised, scales = fp8_quantise(x)

    torch.testing.assert_close(quantised.float() * scales[:, None], x, rtol=1 / 16, atol=1e-38)
    assert_exact(x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_makes_its_row_so_and_no_other(value: float) -> None:
    x = normal(3, 40)
    x[1, 7] = value

    with checked():
        quantised, scales = fp8_quantise(x)

    assert not scales[1].isfinite()
    assert quantised[1, 7].isnan()
    assert (quantised.float() * scales[:, None])[1].isnan().all()
    assert scales[[0, 2]].isfinite().all()
    assert_exact(x)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    x = normal(5, 96)
    with checked():
        together, scales = fp8_quantise(x)
        alone, scale = fp8_quantise(x[3:4])

    assert torch.equal(alone.view(torch.uint8), together[3:4].view(torch.uint8))
    assert torch.equal(scale, scales[3:4])


def test_rows_that_no_block_holds_are_refused() -> None:
    with checked(), pytest.raises(ContractError, match="size must be at most 32768, came 32769"):
        fp8_quantise(torch.zeros(1, 32769))


def test_an_argument_that_is_no_matrix_of_floats_is_refused() -> None:
    with pytest.raises(AssertionError):
        fp8_quantise(torch.zeros(4))
    with pytest.raises(AssertionError):
        fp8_quantise(torch.zeros(4, 0))
    with checked(), pytest.raises(ContractError, match="x must be float32 or bfloat16 or float16"):
        fp8_quantise(torch.zeros(2, 4, dtype=torch.int32))


@pytest.mark.parametrize("size", [16, 1024, 4096, 14336, 28672])
def test_every_launch_of_a_served_model_has_its_variant(size: int) -> None:
    assert_bundled(lambda: fp8_quantise(torch.zeros(3, size, dtype=torch.bfloat16)))
