import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError
from kernels.rotary import reference
from kernels.rotary.api import rotary
from tests.kernels.launches import assert_bundled
from tests.kernels.tolerances import DTYPES, ROUNDINGS


def angles(num_tokens: int, head_dim: int) -> torch.Tensor:
    half = torch.rand(num_tokens, 1, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    return torch.cat((half, half), dim=-1)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("head_dim", [2, 6, 64])
def test_equals_complex_rotation(head_dim: int) -> None:
    x = normal(5, 3, head_dim)
    turns = angles(5, head_dim)

    turned = rotary(x, turns.cos(), turns.sin())

    half = head_dim // 2
    as_complex = torch.complex(x[..., :half], x[..., half:])
    expected = as_complex * torch.exp(1j * turns[..., :half])
    torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1))


def test_a_view_is_not_written_to() -> None:
    fused = normal(4, 6, 8)
    before = fused.clone()
    turns = angles(4, 8)

    rotary(fused[:, :3], turns.cos(), turns.sin())
    with checked():
        rotary(fused[:, :3], turns.cos(), turns.sin())

    assert torch.equal(fused, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim"),
    [(1, 1, 2), (3, 5, 6), (2, 17, 64), (1, 9, 128), (2, 1, 254), (0, 3, 64)],
)
def test_the_kernel_equals_its_reference(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    x, turns = normal(num_tokens, num_heads, head_dim, dtype=dtype), angles(num_tokens, head_dim)
    cos, sin = turns.cos().to(dtype), turns.sin().to(dtype)
    is_exact = dtype != torch.float32
    tolerance = 0.0 if is_exact else ROUNDINGS[dtype]

    assert_equals_reference(
        rotary, reference.rotary, x, cos, sin, rtol=tolerance, atol=tolerance / 8
    )


def test_the_halves_may_have_cosines_of_their_own() -> None:
    x, cos, sin = normal(2, 3, 16), normal(2, 1, 16) + 1, normal(2, 1, 16) - 1

    assert_equals_reference(rotary, reference.rotary, x, cos, sin, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("heads", [slice(0, 3), slice(4, 8)], ids=["first", "inner"])
def test_heads_within_a_fused_projection_are_read_through_their_strides(heads: slice) -> None:
    fused, turns = normal(4, 9, 16, dtype=torch.float16), angles(4, 16).half()

    assert_equals_reference(rotary, reference.rotary, fused[:, heads], turns.cos(), turns.sin())


def test_a_token_alone_equals_the_token_in_a_batch() -> None:
    x, turns = normal(7, 3, 64), angles(7, 64)
    cos, sin = turns.cos(), turns.sin()

    with checked():
        turned, alone = rotary(x, cos, sin), rotary(x[4:5], cos[4:5], sin[4:5])

    assert torch.equal(turned[4:5], alone)


def test_cosines_of_other_tokens_are_refused() -> None:
    with pytest.raises(AssertionError):
        rotary(torch.zeros(4, 2, 8), torch.zeros(3, 1, 8), torch.zeros(3, 1, 8))


def test_an_odd_head_is_refused() -> None:
    with pytest.raises(AssertionError):
        rotary(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), torch.zeros(1, 1, 3))


def test_a_head_that_no_block_holds_is_refused() -> None:
    turns = torch.zeros(1, 1, 258)
    with checked(), pytest.raises(ContractError, match="half must be at most 128, came 129"):
        rotary(torch.zeros(1, 1, 258), turns, turns)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128, 256])
def test_every_launch_of_bfloat16_has_its_variant(head_dim: int) -> None:
    dtype = torch.bfloat16
    fused, turns = torch.zeros(2, 9, head_dim, dtype=dtype), torch.zeros(2, 1, head_dim).to(dtype)

    assert_bundled(lambda: rotary(fused, turns, turns))
    assert_bundled(lambda: rotary(fused.new_zeros(2, 5, head_dim)[:, :3], turns, turns))
