import pytest
import torch

from kernels.linear.api import linear, pack_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "in_size", "out_size"), [(1, 5, 3), (8, 64, 96), (33, 7, 1)]
)
def test_packed_equals_the_matrix_product(
    dtype: torch.dtype, has_bias: bool, num_tokens: int, in_size: int, out_size: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, in_size, generator=generator).to(dtype)
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    bias = torch.randn(out_size, generator=generator).to(dtype) if has_bias else None

    product = linear(x, pack_linear(weight, bias))

    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    assert product.dtype == dtype
    torch.testing.assert_close(product.double(), expected, atol=tolerance, rtol=tolerance)


def test_no_rows_give_no_rows() -> None:
    assert linear(torch.zeros(0, 8), pack_linear(torch.zeros(4, 8))).shape == (0, 4)


def test_a_strided_input_is_read_right() -> None:
    x = torch.arange(24.0).view(4, 6)[:, ::2]

    product = linear(x, pack_linear(torch.eye(3)))

    assert torch.equal(product, x)


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError):
        linear(torch.zeros(1, 5), pack_linear(torch.zeros(4, 8)))
