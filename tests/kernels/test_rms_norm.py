import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.kernel import SERVED
from kernels.rms_norm import reference
from kernels.rms_norm.api import rms_norm
from tests.kernels.launches import assert_bundled
from tests.kernels.tolerances import DTYPES, ROUNDINGS


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (7, 63), (3, 5, 64)])
def test_a_row_of_root_mean_square_one(shape: tuple[int, ...]) -> None:
    x = normal(*shape) * 100
    weight = torch.linspace(0.5, 2.0, shape[-1])

    normed = rms_norm(x, weight, 0.0).double() / weight.double()

    mean_square = normed.square().mean(-1)
    torch.testing.assert_close(mean_square, torch.ones_like(mean_square), atol=1e-5, rtol=0)
    torch.testing.assert_close(normed.sign(), x.sign().double())


def test_epsilon_keeps_a_zero_row_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()


def test_statistics_are_float32_for_narrow_inputs() -> None:
    x = torch.full((1, 4), 60_000.0, dtype=torch.float16)  # its square overflows float16

    normed = rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6)

    assert normed.dtype == torch.float16
    assert normed.eq(1.0).all()


def test_the_residual_becomes_the_sum_and_its_norm_is_returned() -> None:
    x, residual = normal(3, 63, dtype=torch.bfloat16), normal(3, 63, seed=1)
    weight = normal(63, dtype=torch.bfloat16, seed=2)
    added = residual + x.float()

    normed = rms_norm(x, weight, 1e-5, residual)

    assert torch.equal(residual, added)
    rounded = rms_norm(added, torch.ones(63), 1e-5).bfloat16()
    assert torch.equal(normed, weight * rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 63), (1, 576), (3, 5, 64), (17, 1, 128), (2, 2, 3, 129), (5,), (0, 64)]
)
def test_the_kernel_equals_its_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)

    assert_equals_reference(
        rms_norm, reference.rms_norm, x, weight, 1e-5, rtol=ROUNDINGS[dtype], atol=1e-7
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 63), (2, 576), (2, 3, 40), (0, 64)])
def test_the_kernel_with_a_residual_equals_its_reference(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, residual = normal(*shape, dtype=dtype), normal(*shape, seed=1)
    weight = normal(shape[-1], dtype=dtype, seed=2)

    assert_equals_reference(
        rms_norm, reference.rms_norm, x, weight, 1e-5, residual, rtol=ROUNDINGS[dtype], atol=1e-7
    )


@pytest.mark.parametrize("size", [1025, 4097])
def test_wide_rows(size: int) -> None:
    x, weight = normal(2, size), normal(size, seed=1)

    assert_equals_reference(rms_norm, reference.rms_norm, x, weight, 1e-5, rtol=1e-6, atol=1e-7)


def test_heads_within_a_fused_projection_are_read_through_their_strides() -> None:
    fused = normal(3, 9, 64)
    key = fused[:, 4:6]

    assert_equals_reference(
        rms_norm, reference.rms_norm, key, normal(64), 1e-5, rtol=1e-6, atol=1e-7
    )


def test_rows_and_residual_rows_of_other_strides() -> None:
    x, residual = normal(3, 96)[:, :64], normal(3, 80)[:, :64]

    assert_equals_reference(
        rms_norm, reference.rms_norm, x, normal(64), 1e-5, residual, rtol=1e-6, atol=1e-7
    )


def test_nan_and_infinity_stay_in_their_row() -> None:
    x, weight = normal(3, 64), torch.ones(64)
    x[0, 5], x[2, 0] = float("nan"), float("inf")

    with checked():
        normed, alone = rms_norm(x, weight, 1e-5), rms_norm(x[1:2], weight, 1e-5)

    assert normed[0].isnan().all()
    assert torch.equal(normed[1:2], alone)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed, expected, equal_nan=True, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [64, 576])
def test_a_row_alone_equals_the_row_in_a_batch(size: int) -> None:
    x = normal(19, size)
    weight = torch.ones(size)

    assert torch.equal(rms_norm(x, weight, 1e-5)[4:5], rms_norm(x[4:5], weight, 1e-5))
    with checked():
        assert torch.equal(rms_norm(x, weight, 1e-5)[4:5], rms_norm(x[4:5], weight, 1e-5))


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="8"):
        rms_norm(torch.zeros(2, 8), torch.ones(4), 1e-6)


def test_a_weight_of_another_dtype_is_refused() -> None:
    with checked(), pytest.raises(ContractError, match="weight must be bfloat16 like x"):
        rms_norm(torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(8), 1e-6)


def test_a_narrow_residual_is_refused() -> None:
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with checked(), pytest.raises(ContractError, match="residual must be float32"):
        rms_norm(x, x.new_ones(8), 1e-6, torch.zeros_like(x))


def test_a_residual_that_is_the_input_is_refused() -> None:
    x = torch.zeros(2, 8)
    with checked(), pytest.raises(ContractError, match="residual must be apart from x"):
        rms_norm(x, torch.ones(8), 1e-6, x)


@pytest.mark.parametrize("residual", [False, True])
def test_rows_that_no_block_holds_are_refused(residual: bool) -> None:
    x = torch.zeros(1, 16385)
    with checked(), pytest.raises(ContractError, match="size must be at most 16384, came 16385"):
        rms_norm(x, torch.ones(16385), 1e-6, x.clone() if residual else None)


@pytest.mark.parametrize("dtype", SERVED)
@pytest.mark.parametrize("size", [1, 64, 100, 128, 576, 1000, 4096, 5120, 16384])
def test_every_launch_has_its_variant(size: int, dtype: torch.dtype) -> None:
    x, weight = torch.zeros(3, size, dtype=dtype), torch.zeros(size, dtype=dtype)

    assert_bundled(lambda: rms_norm(x, weight, 1e-5))
    assert_bundled(lambda: rms_norm(x, weight, 1e-5, x.float().clone()))
    assert_bundled(lambda: rms_norm(x[:, None].expand(3, 2, size), weight, 1e-5))
