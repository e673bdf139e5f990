from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError, DeviceAssertion, DoubleStore
from kernels.kernel import SERVED
from kernels.kv_append.api import kv_append
from kernels.launch import cdiv
from kernels.rope_append import reference
from kernels.rope_append.api import rope_append
from kernels.rotary.api import rotary
from tests.kernels.launches import assert_bundled
from tests.kernels.tolerances import DTYPES, ROUNDINGS

# num_tokens, num_heads, num_kv_heads, head_dim
SHAPES = [
    (1, 1, 1, 2),
    (3, 5, 2, 6),
    (2, 9, 3, 64),
    (2, 17, 9, 128),
    (1, 3, 5, 254),
    (0, 2, 1, 64),
]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turns(num_tokens: int, head_dim: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    angles = normal(num_tokens, 1, head_dim, seed=5) * 3
    yield angles.cos().to(dtype)
    yield angles.sin().to(dtype)


def heads_of(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    """Query, key and value within one fused projection, of heads that start at 16 bytes."""
    width = cdiv(head_dim, 8) * 8
    fused = normal(num_tokens, num_heads + 2 * num_kv_heads, width, dtype=dtype)[..., :head_dim]
    yield from fused.split((num_heads, num_kv_heads, num_kv_heads), dim=1)


def slots(num_tokens: int, num_slots: int) -> torch.Tensor:
    """Scattered; every third token has none."""
    mapping = torch.randperm(num_slots, generator=torch.Generator().manual_seed(4))[:num_tokens]
    mapping[1::3] = -1
    return mapping


def test_keys_are_turned_into_their_slot_values_copied_and_queries_returned() -> None:
    caches = [torch.full((2, 2, 1, 2), -7.0) for _ in "kv"]
    query, key, value = torch.tensor([[[1.0, 2.0], [5.0, 6.0], [3.0, 4.0], [8.0, 9.0]]]).split(
        (2, 1, 1), dim=1
    )
    quarter = torch.zeros(1, 1, 2)

    turned = rope_append(query, key, value, quarter, quarter + 1, *caches, torch.tensor([2]))

    assert turned.tolist() == [[[-2.0, 1.0], [-6.0, 5.0]]]
    assert caches[0][1, 0, 0].tolist() == [-4.0, 3.0]
    assert caches[1][1, 0, 0].tolist() == [8.0, 9.0]
    assert [cache.eq(-7.0).all(-1).sum() for cache in caches] == [3, 3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_the_kernel_equals_its_reference(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    tolerance = ROUNDINGS[dtype] if dtype == torch.float32 else 0.0

    assert_equals_reference(
        rope_append,
        reference.rope_append,
        *heads_of(num_tokens, num_heads, num_kv_heads, head_dim, dtype),
        *turns(num_tokens, head_dim, dtype),
        *(normal(3, 2, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (2, 3)),
        slots(num_tokens, 6),
        rtol=tolerance,
        atol=tolerance / 4,
    )


def test_one_launch_has_the_bits_of_two() -> None:
    query, key, value = heads_of(4, 9, 3, 32, torch.float32)
    cos, sin = turns(4, 32, torch.float32)
    once, twice = ([torch.zeros(2, 4, 3, 32) for _ in "kv"] for _ in range(2))

    with checked():
        turned = rope_append(query, key, value, cos, sin, *once, slots(4, 8))
        kv_append(rotary(key, cos, sin), value, *twice, slots(4, 8))
        assert torch.equal(turned, rotary(query, cos, sin))

    assert torch.equal(torch.stack(once), torch.stack(twice))


def test_heads_of_strides_of_their_own() -> None:
    query, value = normal(3, 7, 12)[:, 1:6, :10], normal(2, 3, 10).transpose(0, 1)
    key = normal(3, 2, 40, seed=1)[..., 12:22]

    assert_equals_reference(
        rope_append,
        reference.rope_append,
        query,
        key,
        value,
        *turns(3, 10, torch.float32),
        *(normal(1, 5, 2, 10, seed=seed) for seed in (2, 3)),
        torch.tensor([4, 0, 2]),
        rtol=1e-6,
        atol=1e-6,
    )


def test_tokens_without_a_slot_have_their_queries_turned() -> None:
    caches = [normal(2, 2, 1, 8, dtype=torch.bfloat16, seed=seed) for seed in (2, 3)]
    before = torch.stack(caches)
    query, key, value = heads_of(3, 2, 1, 8, torch.bfloat16)
    cos, sin = turns(3, 8, torch.bfloat16)

    with checked():
        turned = rope_append(query, key, value, cos, sin, *caches, torch.full((3,), -1))

    assert torch.equal(turned, rotary(query, cos, sin))
    assert torch.equal(torch.stack(caches), before)


@pytest.mark.parametrize("is_checked", [False, True], ids=["reference", "kernel"])
def test_the_result_can_be_put_where_it_is_wanted(is_checked: bool) -> None:
    query, key, value = heads_of(3, 2, 1, 8, torch.float32)
    arguments = (query, key, value, *turns(3, 8, torch.float32))
    caches = [normal(2, 2, 1, 8, seed=seed) for seed in (2, 3)]
    wanted = torch.empty(5, 2, 8)[1:4]

    with checked() if is_checked else nullcontext():
        turned = rope_append(*arguments, *caches, torch.tensor([3, 0, 2]), wanted)

    assert turned.data_ptr() == wanted.data_ptr()
    torch.testing.assert_close(wanted, rotary(query, *arguments[3:]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_checked", [False, True], ids=["reference", "kernel"])
def test_the_projection_stays_and_the_result_is_contiguous(is_checked: bool) -> None:
    fused = normal(3, 6, 8)
    before = fused.clone()
    arguments = (*fused.split((4, 1, 1), dim=1), *turns(3, 8, torch.float32))
    caches = [torch.zeros(1, 4, 1, 8) for _ in "kv"]

    if is_checked:
        with checked():
            turned = rope_append(*arguments, *caches, torch.arange(3))
    else:
        turned = rope_append(*arguments, *caches, torch.arange(3))

    assert turned.is_contiguous()
    assert torch.equal(fused, before)


def test_a_token_alone_equals_the_token_in_a_batch() -> None:
    heads, (cos, sin) = [*heads_of(5, 3, 2, 64, torch.float32)], turns(5, 64, torch.float32)
    together, alone = ([torch.zeros(1, 8, 2, 64) for _ in "kv"] for _ in range(2))
    mapping = torch.randperm(8, generator=torch.Generator().manual_seed(4))[:5]

    with checked():
        turned = rope_append(*heads, cos, sin, *together, mapping)
        for token in range(5):
            one = slice(token, token + 1)
            of_one = [each[one] for each in (*heads, cos, sin)]
            assert torch.equal(rope_append(*of_one, *alone, mapping[one]), turned[one])

    assert torch.equal(torch.stack(together), torch.stack(alone))


@pytest.mark.parametrize("slot", [-2, 4, 2**40])
def test_a_slot_beyond_the_cache_is_noticed(slot: int) -> None:
    heads, caches = heads_of(1, 2, 1, 4, torch.float32), [torch.zeros(2, 2, 1, 4) for _ in "kv"]

    with checked(), pytest.raises(DeviceAssertion, match="a slot beyond the cache"):
        rope_append(*heads, *turns(1, 4, torch.float32), *caches, torch.tensor([slot]))


def test_two_tokens_of_one_slot_are_noticed() -> None:
    heads, caches = heads_of(2, 2, 1, 4, torch.float32), [torch.zeros(2, 2, 1, 4) for _ in "kv"]

    with checked(), pytest.raises(DoubleStore, match="key_cache"):
        rope_append(*heads, *turns(2, 4, torch.float32), *caches, torch.tensor([3, 3]))


def test_a_head_that_no_block_holds_is_refused() -> None:
    heads, caches = heads_of(1, 1, 1, 258, torch.float32), [torch.zeros(1, 1, 1, 258) for _ in "kv"]
    with checked(), pytest.raises(ContractError, match="half must be at most 128, came 129"):
        rope_append(*heads, *turns(1, 258, torch.float32), *caches, torch.tensor([0]))


def test_an_odd_head_is_refused() -> None:
    odd, caches = torch.zeros(1, 1, 3), [torch.zeros(1, 1, 1, 3) for _ in "kv"]
    with pytest.raises(AssertionError):
        rope_append(odd, odd, odd, odd, odd, *caches, torch.tensor([0]))


def test_a_cache_that_a_flatten_would_copy_is_refused() -> None:
    heads, cache = heads_of(1, 2, 2, 4, torch.float32), torch.zeros(4, 2, 2, 4).transpose(0, 1)
    with pytest.raises(AssertionError, match="swallow"):
        rope_append(*heads, *turns(1, 4, torch.float32), cache, cache, torch.tensor([0]))


def test_one_cache_for_both_is_refused() -> None:
    heads, cache = heads_of(1, 1, 1, 4, torch.float32), torch.zeros(1, 2, 1, 4)
    with checked(), pytest.raises(ContractError, match="key_cache must be apart from value_cache"):
        rope_append(*heads, *turns(1, 4, torch.float32), cache, cache, torch.tensor([0]))


@pytest.mark.parametrize("dtype", SERVED)
@pytest.mark.parametrize("head_dim", [2, 64, 80, 128, 256])
def test_every_launch_has_its_variant(head_dim: int, dtype: torch.dtype) -> None:
    caches = [torch.zeros(1, 4, 2, head_dim, dtype=dtype) for _ in "kv"]
    cos_sin = [*turns(3, head_dim, dtype)]

    for num_heads in (3, 16):
        heads = [*heads_of(3, num_heads, 2, head_dim, dtype)]
        assert_bundled(lambda heads=heads: rope_append(*heads, *cos_sin, *caches, torch.arange(3)))
