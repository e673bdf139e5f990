import pytest
import torch

from kernels.silu_mul.api import silu_mul


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 63), (2, 1536)])
def test_the_gate_is_the_first_half(num_tokens: int, size: int) -> None:
    gate_up = torch.randn(num_tokens, 2 * size, generator=torch.Generator().manual_seed(0))
    gate, up = gate_up[:, :size].double(), gate_up[:, size:].double()
    before = gate_up.clone()

    product = silu_mul(gate_up)

    torch.testing.assert_close(product.double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=0)
    assert torch.equal(gate_up, before)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(AssertionError):
        silu_mul(torch.zeros(1, 3))
