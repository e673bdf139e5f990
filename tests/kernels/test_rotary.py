import pytest
import torch

from kernels.rotary.api import rotary


def angles(num_tokens: int, head_dim: int) -> torch.Tensor:
    half = torch.rand(num_tokens, 1, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    return torch.cat((half, half), dim=-1)


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_equals_complex_rotation(head_dim: int) -> None:
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(2))
    turns = angles(5, head_dim)

    turned = rotary(x, turns.cos(), turns.sin())

    half = head_dim // 2
    as_complex = torch.complex(x[..., :half], x[..., half:])
    expected = as_complex * torch.exp(1j * turns[..., :half])
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1))


def test_a_view_is_not_written_to() -> None:
    fused = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(4))
    before = fused.clone()
    turns = angles(4, 8)

    rotary(fused[:, :3], turns.cos(), turns.sin())

    assert torch.equal(fused, before)


def test_cosines_of_other_tokens_are_refused() -> None:
    with pytest.raises(AssertionError):
        rotary(torch.zeros(4, 2, 8), torch.zeros(3, 1, 8), torch.zeros(3, 1, 8))
