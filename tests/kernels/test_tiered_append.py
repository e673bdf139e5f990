"""Turned, rotated and appended: the same bits as the reference, and the attention of before."""

from contextlib import nullcontext

import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError, DeviceAssertion, DoubleStore
from kernels.rotary.api import rotary
from kernels.tiered_append import reference
from kernels.tiered_append.api import tiered_append
from kernels.tiered_append.hadamard import rotated
from kernels.tiered_decode.reference import Slabs, tiered_decode
from kernels.tiered_plan.reference import Formats
from tests.kernels.appended_tokens import Appended, appended, scattered_slots
from tests.kernels.launches import assert_bundled

# num_tokens, num_heads, num_kv_heads, size
SHAPES = [(1, 1, 1, 64), (3, 17, 2, 64), (2, 9, 9, 128), (2, 3, 5, 256), (0, 2, 1, 128)]


def test_a_token_is_turned_rotated_and_put_into_its_slots() -> None:
    query, key, value = torch.tensor([[[1.0, 2, 3, 4], [1, 0, 0, 0], [5, 6, 7, 8]]]).split(1, dim=1)
    slabs = torch.zeros(2, 3, 1, 32 * 4, dtype=torch.uint8)
    cos, sin = torch.tensor([[[[0.0, 1, 0, 1]]], [[[1.0, 0, 1, 0]]]])  # a quarter, and none

    result = tiered_append(
        query, key, value, cos, sin, *slabs, torch.tensor([17]), torch.tensor([40])
    )

    assert result.tolist() == [[[2, -4, -3, -1]]]  # of -3, 2, 1, 4
    key_slots, value_slots = slabs.view(torch.bfloat16).view(2, 48, 4)
    assert key_slots[17].tolist() == [0.5, 0.5, -0.5, -0.5]  # of 0, 0, 1, 0
    assert value_slots[40].tolist() == [5, 6, 7, 8]
    assert slabs.count_nonzero(dim=(1, 2, 3)).tolist() == [4, 7]


@pytest.mark.parametrize("size", [1, 2, 8, 64, 128, 256])
def test_the_rotation_is_a_hadamard_matrix_and_its_own_inverse(size: int) -> None:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64), matrix)
    x = torch.randn(3, 2, size, dtype=torch.float64)

    torch.testing.assert_close(rotated(x), x @ matrix / size**0.5)
    torch.testing.assert_close(rotated(rotated(x)), x)


@pytest.mark.parametrize(("num_tokens", "num_heads", "num_kv_heads", "size"), SHAPES)
def test_the_kernel_equals_its_reference_to_the_bit(
    num_tokens: int, num_heads: int, num_kv_heads: int, size: int
) -> None:
    arguments = appended(num_tokens, num_heads, num_kv_heads, size)
    assert_equals_reference(tiered_append, reference.tiered_append, *arguments)


def test_channels_of_very_different_sizes_are_rounded_once() -> None:
    arguments = appended(3, 2, 2, 128)
    exponents = torch.arange(128) % 41 - 20
    for heads in arguments[:2]:
        heads.mul_(torch.exp2(exponents).bfloat16())
    exact = rotated(reference_turn(arguments.query.double(), arguments))

    assert_equals_reference(tiered_append, reference.tiered_append, *arguments)
    result = reference.tiered_append(*arguments).double()

    of_the_sums = exact.abs().amax(-1, keepdim=True) * 2**-20
    assert ((result - exact).abs() <= exact.abs() * 2**-8 + of_the_sums).all()


def reference_turn(x: torch.Tensor, arguments: Appended) -> torch.Tensor:
    return rotary(x, arguments.cos.to(x.dtype), arguments.sin.to(x.dtype))


def test_attention_over_what_was_appended_is_that_of_the_plain_tokens() -> None:
    num_tokens, num_heads, num_kv_heads, size = 40, 6, 2, 64
    tokens = appended(num_tokens, num_heads, num_kv_heads, size, num_slabs=3)
    key_table, value_table = torch.tensor([[2, 0, 1]]), torch.tensor([[1, 2, 0]])
    key_slots, value_slots = (
        (table.T * 16 + torch.arange(16)).flatten()[:num_tokens]
        for table in (key_table, value_table)
    )
    tokens = tokens._replace(
        value=rotated(tokens.value.float()).bfloat16(), key_slots=key_slots, value_slots=value_slots
    )
    query = tiered_append(*tokens)[-1:]

    meta = torch.zeros(3, num_kv_heads, 2, size, dtype=torch.float16)
    slabs = Slabs(tokens.key_slabs, tokens.value_slabs, meta, meta)
    bounds = torch.tensor([[0, 0, 0, num_tokens]])
    attended, lse = tiered_decode(
        query, slabs, key_table, value_table, bounds, Formats(8, 4), size**-0.5
    )

    plain = appended(num_tokens, num_heads, num_kv_heads, size, num_slabs=3)
    turned = reference_turn(
        plain.query.double()[-1:], plain._replace(cos=plain.cos[-1:], sin=plain.sin[-1:])
    )
    keys = reference_turn(plain.key.double(), plain).repeat_interleave(3, 1)
    scores = torch.einsum("qhd,thd->qht", turned, keys) * size**-0.5
    values = plain.value.double().repeat_interleave(3, 1)
    expected = torch.einsum("qht,thd->qhd", scores.softmax(-1), values)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=0.02)
    error = rotated(attended) - expected
    assert error.norm() < 2**-7 * expected.norm()


def test_heads_of_strides_of_their_own() -> None:
    arguments = appended(3, 5, 2, 64)
    normal = torch.randn(3, 2, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    arguments = arguments._replace(
        key=normal[..., 16:], value=normal.transpose(0, 1).contiguous().transpose(0, 1)[..., :64]
    )
    assert_equals_reference(tiered_append, reference.tiered_append, *arguments)


def test_tokens_without_a_slot_have_their_queries_rotated() -> None:
    arguments = appended(3, 2, 1, 64)
    alone = appended(3, 2, 1, 64)._replace(
        key_slots=torch.full((3,), -1), value_slots=torch.full((3,), -1)
    )
    before = torch.stack((alone.key_slabs, alone.value_slabs))

    with checked():
        assert torch.equal(tiered_append(*alone), tiered_append(*arguments))

    assert torch.equal(torch.stack((alone.key_slabs, alone.value_slabs)), before)


@pytest.mark.parametrize("is_checked", [False, True], ids=["reference", "kernel"])
def test_the_projection_stays_and_the_result_is_where_it_is_wanted(is_checked: bool) -> None:
    arguments = appended(3, 2, 1, 64)
    before = [each.clone() for each in arguments[:3]]
    wanted = torch.empty(5, 2, 64, dtype=torch.bfloat16)[1:4]

    with checked() if is_checked else nullcontext():
        result = tiered_append(*arguments, wanted)

    assert result.data_ptr() == wanted.data_ptr()
    assert torch.equal(wanted, reference.tiered_append(*arguments))
    assert all(map(torch.equal, arguments[:3], before))


def test_a_token_alone_equals_the_token_in_a_batch() -> None:
    together, alone = (appended(4, 3, 2, 64) for _ in range(2))

    with checked():
        result = tiered_append(*together)
        for token in range(4):
            one = slice(token, token + 1)
            heads, slots = ([each[one] for each in part] for part in (alone[:5], alone[7:]))
            slabs = (alone.key_slabs, alone.value_slabs)
            assert torch.equal(tiered_append(*heads, *slabs, *slots), result[one])

    assert torch.equal(alone.key_slabs, together.key_slabs)
    assert torch.equal(alone.value_slabs, together.value_slabs)


@pytest.mark.parametrize("slot", [-2, 64, 2**40])
@pytest.mark.parametrize("which", ["key_slots", "value_slots"])
def test_a_slot_beyond_the_arena_is_noticed(which: str, slot: int) -> None:
    arguments = appended(1, 1, 1, 64)._replace(**{which: torch.tensor([slot])})
    with checked(), pytest.raises(DeviceAssertion, match="a slot beyond the arena"):
        tiered_append(*arguments)


@pytest.mark.parametrize("which", ["key", "value"])
def test_two_tokens_of_one_slot_are_noticed(which: str) -> None:
    arguments = appended(2, 1, 1, 64)._replace(**{f"{which}_slots": torch.tensor([3, 3])})
    with checked(), pytest.raises(DoubleStore, match=f"{which}_slabs"):
        tiered_append(*arguments)


def test_a_head_that_no_kernel_rotates_is_refused() -> None:
    with checked(), pytest.raises(ContractError, match="of heads of 64 or 128 or 256, came 32"):
        tiered_append(*appended(1, 1, 1, 32))


def test_one_arena_for_both_is_refused() -> None:
    arguments = appended(1, 1, 1, 64)
    arguments = arguments._replace(value_slabs=arguments.key_slabs)
    with checked(), pytest.raises(ContractError, match="key_slabs must be apart from value_slabs"):
        tiered_append(*arguments)


@pytest.mark.parametrize("size", [64, 128])
def test_every_launch_has_its_variant(size: int) -> None:
    for num_heads in (3, 32):
        arguments = appended(3, num_heads, 2, size)
        assert_bundled(lambda arguments=arguments: tiered_append(*arguments))


def test_slots_are_scattered_and_some_tokens_have_none() -> None:
    slots = scattered_slots(30, 4, seed=0)
    assert (slots >= 0).sum() == slots[slots >= 0].unique().numel() == 20
