from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.checked_interpreter import checked
from kernels.errors import ContractError
from kernels.fp8_linear import api
from kernels.fp8_linear.api import Fp8Linear, fp8_linear, library_product, pack_fp8
from kernels.fp8_linear.reference import scaled_product
from kernels.fp8_quantise.api import fp8_quantise
from tests.kernels.tolerances import DTYPES, ROUNDINGS

NOT_SUPPORTED = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgo...`"


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(
    out_size: int, in_size: int, dtype: torch.dtype = torch.float32, *, has_bias: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Outputs of unequal size."""
    sizes = torch.logspace(-3, 2, out_size)[:, None]
    weight = (normal(out_size, in_size, seed=1) * sizes / in_size**0.5).to(dtype)
    return weight, normal(out_size, dtype=dtype, seed=2) if has_bias else None


def relative_error(came: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Of each column."""
    difference = (came.double() - expected.double()).square().mean(dim=0)
    return (difference / expected.double().square().mean(dim=0)).sqrt()


def dequantised(quantised: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return quantised.double() * scales.double()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_it_is_the_product_of_what_both_were_rounded_to(
    num_rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, bias = weights_of(48, 80, dtype, has_bias=has_bias)
    x = (normal(num_rows, 96, dtype=dtype) * torch.logspace(-2, 1, num_rows)[:, None])[:, :80]
    packed = pack_fp8(weight, bias)

    product = fp8_linear(x.to(dtype), packed)

    rounded = dequantised(*fp8_quantise(x.to(dtype)))
    expected = F.linear(rounded, dequantised(packed.weight, packed.scales))
    expected = expected if bias is None else expected + bias.double()
    assert product.dtype == dtype
    scale = 2e-6 * expected.abs().amax(dim=0).mean().item()
    torch.testing.assert_close(
        product.double(), expected, rtol=2 * ROUNDINGS[dtype], atol=scale + ROUNDINGS[dtype]
    )


def test_every_output_is_within_a_few_percent_of_the_exact_product() -> None:
    weight, _ = weights_of(64, 512)
    x = normal(256, 512)

    errors = relative_error(fp8_linear(x, pack_fp8(weight)), F.linear(x, weight))

    assert errors.max() < 0.045, errors.max()  # two roundings to 4 significant bits
    assert errors.min() > 0.02, errors.min()


def test_a_row_and_an_output_of_zeros() -> None:
    weight, bias = weights_of(32, 64, has_bias=True)
    assert bias is not None
    weight[5], x = 0.0, normal(3, 64)
    x[1] = 0.0

    product = fp8_linear(x, pack_fp8(weight, bias))

    assert torch.equal(product[1], bias)
    assert torch.equal(product[:, 5], bias[5].expand(3))


def test_no_rows() -> None:
    assert fp8_linear(torch.zeros(0, 32), pack_fp8(torch.ones(16, 32))).shape == (0, 16)


def test_a_row_with_nan_is_nan_and_the_others_are_not() -> None:
    x = normal(3, 32)
    x[1, 3] = float("nan")

    product = fp8_linear(x, pack_fp8(weights_of(16, 32)[0]))

    assert product[1].isnan().all()
    assert product[[0, 2]].isfinite().all()


def test_a_packed_weight_has_a_byte_a_number_and_keeps_nothing_else() -> None:
    weight = normal(48, 64, dtype=torch.bfloat16)

    packed = pack_fp8(weight)

    assert packed.weight.nbytes == weight.nbytes // 2
    assert packed.scales.shape == (48,)
    assert packed.weight.data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("shape", [(48, 40), (40, 48), (16, 0), (1, 16)])
def test_sizes_that_16_does_not_divide_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ContractError, match=r"weight must be \[out_size, in_size\], both multip"):
        pack_fp8(torch.zeros(shape))


def test_a_row_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="40"):
        fp8_linear(torch.zeros(2, 40), pack_fp8(torch.ones(16, 32)))


def test_the_quantising_kernel_makes_the_same_product() -> None:
    weight, bias = weights_of(32, 64, torch.bfloat16, has_bias=True)
    x = normal(5, 64, dtype=torch.bfloat16)

    with checked():
        product = fp8_linear(x, pack_fp8(weight, bias))

    assert torch.equal(product, fp8_linear(x, pack_fp8(weight, bias)))


class Library:
    """In the place of `torch._scaled_mm`: as cuBLAS, it does not scale so many rows."""

    def __init__(self, refused: set[int], message: str = NOT_SUPPORTED) -> None:
        self.refused, self.message = refused, message
        self.calls: list[str] = []

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        x_scales: torch.Tensor,
        scales: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        assert weight.stride(0) == 1, "of columns that are contiguous"
        if x_scales.numel() == scales.numel() == 1:
            self.calls.append("whole")
            assert out_dtype == torch.float32
        else:
            self.calls.append("rows")
            assert x_scales.shape == (len(x), 1)
            assert scales.shape == (1, weight.shape[1])
            if len(x) in self.refused:
                raise RuntimeError(self.message)
        return (x.float() @ weight.float() * x_scales * scales).to(out_dtype)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Fp8Linear:
    monkeypatch.setattr(api, "_unscalable", set())
    return pack_fp8(weights_of(32, 64)[0])


def arguments(num_rows: int, packed: Fp8Linear) -> tuple[Any, ...]:
    x = normal(num_rows, 64) * torch.linspace(1, 100, num_rows)[:, None]
    return *fp8_quantise(x), packed.weight, packed.scales, torch.bfloat16


@pytest.mark.parametrize("num_rows", [1, 7])
def test_what_the_library_makes_is_the_specified_product(
    num_rows: int, packed: Fp8Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refused in (0, num_rows):
        monkeypatch.setattr(torch, "_scaled_mm", Library({refused}))
        product = library_product(*arguments(num_rows, packed))

        expected = scaled_product(*arguments(num_rows, packed))
        assert product.dtype == torch.bfloat16
        torch.testing.assert_close(product, expected, rtol=ROUNDINGS[torch.bfloat16], atol=1e-6)


def test_a_size_that_the_library_does_not_scale_is_asked_once(
    packed: Fp8Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library({7})
    monkeypatch.setattr(torch, "_scaled_mm", library)

    for num_rows in (7, 8, 7, 7, 8):
        library_product(*arguments(num_rows, packed))

    assert library.calls == ["rows", "whole", "rows", "whole", "whole", "rows"]


def test_any_other_failure_of_the_library_is_raised(
    packed: Fp8Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", Library({7}, "CUDA out of memory"))

    with pytest.raises(RuntimeError, match="out of memory"):
        library_product(*arguments(7, packed))
    assert not api._unscalable
