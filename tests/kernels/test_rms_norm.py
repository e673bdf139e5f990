import pytest
import torch

from kernels.rms_norm.api import rms_norm


@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (7, 63), (3, 5, 64)])
def test_a_row_of_root_mean_square_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
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


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    x = torch.randn(9, 576, generator=torch.Generator().manual_seed(1))
    weight = torch.ones(576)

    assert torch.equal(rms_norm(x, weight, 1e-5)[4:5], rms_norm(x[4:5], weight, 1e-5))


def test_a_weight_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="8"):
        rms_norm(torch.zeros(2, 8), torch.ones(4), 1e-6)
