import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.kernel import SERVED
from kernels.silu_mul import reference
from kernels.silu_mul.api import silu_mul
from tests.kernels.launches import assert_bundled
from tests.kernels.tolerances import DTYPES, ROUNDINGS


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 63), (2, 1536)])
def test_the_gate_is_the_first_half(num_tokens: int, size: int) -> None:
    gate_up = normal(num_tokens, 2 * size)
    gate, up = gate_up[:, :size].double(), gate_up[:, size:].double()
    before = gate_up.clone()

    product = silu_mul(gate_up)

    torch.testing.assert_close(product.double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=0)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "size"), [(1, 1), (3, 63), (5, 2048), (2, 2049), (0, 64), (3, 0)]
)
def test_the_kernel_equals_its_reference(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * normal(num_tokens, 2 * size, dtype=dtype)

    assert_equals_reference(silu_mul, reference.silu_mul, gate_up, rtol=ROUNDINGS[dtype], atol=1e-7)


def test_a_product_that_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "STREAMED_BYTES", 1)
    gate_up = normal(3, 126)

    assert_equals_reference(silu_mul, reference.silu_mul, gate_up, rtol=1e-6, atol=1e-7)
    assert_bundled(lambda: silu_mul(gate_up.to(*SERVED)))


def test_strided_rows() -> None:
    gate_up = normal(3, 100)[:, :34]

    assert_equals_reference(silu_mul, reference.silu_mul, gate_up, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_at_the_ends_of_their_range(dtype: torch.dtype) -> None:
    top, nan = torch.finfo(dtype).max, float("nan")
    gates = [0.0, -0.0, top, -top, 88.8, -88.8, -104.0, torch.finfo(dtype).tiny, nan, float("inf")]
    gate_up = torch.tensor([[*gates, *[0.5] * len(gates)]], dtype=dtype)

    assert_equals_reference(
        silu_mul, reference.silu_mul, gate_up, rtol=ROUNDINGS[dtype], atol=1e-35
    )


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    gate_up = normal(7, 2 * 2054)

    with checked():
        product, alone = silu_mul(gate_up), silu_mul(gate_up[4:5])

    assert torch.equal(product[4:5], alone)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(AssertionError):
        silu_mul(torch.zeros(1, 3))


@pytest.mark.parametrize("dtype", SERVED)
@pytest.mark.parametrize("size", [1, 8, 1000, 14336])
def test_every_launch_has_its_variant(size: int, dtype: torch.dtype) -> None:
    assert_bundled(lambda: silu_mul(torch.zeros(3, 2 * size, dtype=dtype)))
