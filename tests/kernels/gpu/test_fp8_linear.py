"""Linear layers in 8-bit floats: whatever the number of rows, and in a CUDA graph."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kernels.errors import ContractError
from kernels.fp8_linear.api import Fp8Linear, fp8_linear, pack_fp8
from kernels.fp8_quantise.api import fp8_quantise
from tests.kernels.tolerances import FLOAT8_SUM, ROUNDINGS

DTYPE = torch.bfloat16
SIZES = [(16, 16), (6144, 4096), (4096, 14336), (28672, 4096), (576, 1536), (3072, 9216)]
ROWS = [0, 1, 2, 3, 8, 17, 64, 127, 256, 257, 1000]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=DTYPE)


@pytest.fixture
def weights_of(has_fp8: None) -> Callable[..., Fp8Linear]:
    def pack(out_size: int, in_size: int, *, has_bias: bool = False) -> Fp8Linear:
        sizes = torch.logspace(-1, 1, out_size, device="cuda", dtype=DTYPE)[:, None]
        weight = normal(out_size, in_size, seed=1) / in_size**0.5 * sizes
        return pack_fp8(weight, normal(out_size, seed=2) if has_bias else None)

    return pack


@pytest.fixture
def has_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")


def assert_close(came: torch.Tensor, x: torch.Tensor, packed: Fp8Linear) -> None:
    """To two roundings, and what the tensor cores lose of sums of 8-bit floats: bits of the sum of
    magnitudes, however small the result."""
    quantised, scales = fp8_quantise(x)
    rounded = quantised.double() * scales.double()[:, None]
    weight = packed.weight.double() * packed.scales.double()[:, None]
    product, magnitude = F.linear(rounded, weight), F.linear(rounded.abs(), weight.abs())
    expected = product if packed.bias is None else product + packed.bias.double()
    error = (came.double() - expected).abs()
    # The product is rounded before the bias comes to it.
    allowed = ROUNDINGS[DTYPE] * (product.abs() + expected.abs()) + FLOAT8_SUM * magnitude
    assert (error <= allowed).all(), (error - allowed).max()


@pytest.mark.gpu
@pytest.mark.parametrize(("out_size", "in_size"), SIZES)
def test_any_number_of_rows(
    out_size: int, in_size: int, weights_of: Callable[..., Fp8Linear]
) -> None:
    for num_rows in ROWS:
        packed = weights_of(out_size, in_size, has_bias=num_rows % 2 == 0)
        powers = torch.logspace(-2, 2, max(num_rows, 1), device="cuda")[:num_rows, None]
        x = (normal(num_rows, in_size) * powers).to(DTYPE)

        product = fp8_linear(x, packed)

        assert product.shape == (num_rows, out_size)
        assert_close(product, x, packed)


@pytest.mark.gpu
def test_a_graph(weights_of: Callable[..., Fp8Linear]) -> None:
    packed, x = weights_of(4096, 14336), normal(4, 14336)
    fp8_linear(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = fp8_linear(x, packed)

    x.copy_(normal(4, 14336, seed=5))
    graph.replay()

    assert torch.equal(product, fp8_linear(x, packed))


@pytest.mark.gpu
def test_another_dtype_is_refused(weights_of: Callable[..., Fp8Linear]) -> None:
    with pytest.raises(ContractError, match=r"x must be torch\.bfloat16 on a GPU"):
        fp8_linear(torch.zeros(1, 32, device="cuda"), weights_of(16, 32))
