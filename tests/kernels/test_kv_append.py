import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError, DeviceAssertion, DoubleStore
from kernels.kv_append import reference
from kernels.kv_append.api import kv_append
from tests.kernels.launches import assert_bundled
from tests.kernels.tolerances import DTYPES

SHAPES = [(1, 1, 2), (3, 2, 6), (5, 3, 64), (2, 9, 128), (1, 5, 254), (0, 2, 64)]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def slots(num_tokens: int, num_slots: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:num_tokens]


def test_tokens_land_in_their_slots_and_nowhere_else() -> None:
    key_cache = torch.full((3, 4, 2, 5), -7.0)
    value_cache = key_cache.clone()
    key = normal(3, 2, 5)
    value = key + 1

    kv_append(key, value, key_cache, value_cache, torch.tensor([11, 0, 6]))

    for cache, written in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[2, 3], written[0])
        assert torch.equal(cache[0, 0], written[1])
        assert torch.equal(cache[1, 2], written[2])
        assert cache.eq(-7.0).all(-1).all(-1).sum() == 9


def test_a_token_without_a_slot_goes_nowhere() -> None:
    caches = [torch.full((2, 2, 1, 4), -7.0) for _ in "kv"]
    key = normal(3, 1, 4)

    kv_append(key, key, *caches, torch.tensor([-1, 2, -1]))

    for cache in caches:
        assert torch.equal(cache[1, 0], key[1])
        assert cache.eq(-7.0).all(-1).all(-1).sum() == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), SHAPES)
def test_the_kernel_equals_its_reference(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    key, value = (normal(num_tokens, num_heads, head_dim, dtype=dtype, seed=s) for s in (0, 1))
    caches = [normal(3, 2, num_heads, head_dim, dtype=dtype, seed=s) for s in (2, 3)]

    assert_equals_reference(
        kv_append, reference.kv_append, key, value, *caches, slots(num_tokens, 6)
    )


def test_a_fused_projection_with_padding() -> None:
    fused = normal(4, 9, 16, dtype=torch.float16)
    caches = [torch.zeros(2, 4, 2, 16, dtype=torch.float16) for _ in "kv"]

    assert_equals_reference(
        kv_append,
        reference.kv_append,
        fused[:, 5:7],
        fused[:, 7:],
        *caches,
        torch.tensor([3, -1, 0, -1]),
    )


def test_an_odd_head_is_copied() -> None:
    key, caches = normal(2, 3, 7), [torch.zeros(1, 2, 3, 7) for _ in "kv"]

    assert_equals_reference(
        kv_append, reference.kv_append, key, key + 1, *caches, torch.tensor([1, 0])
    )


@pytest.mark.parametrize("slot", [-2, 4, 2**40])
def test_a_slot_beyond_the_cache_is_noticed(slot: int) -> None:
    key, caches = normal(1, 1, 4), [torch.zeros(2, 2, 1, 4) for _ in "kv"]

    with checked(), pytest.raises(DeviceAssertion, match="a slot beyond the cache"):
        kv_append(key, key, *caches, torch.tensor([slot]))


def test_two_tokens_of_one_slot_are_noticed() -> None:
    key, caches = normal(2, 1, 4), [torch.zeros(2, 2, 1, 4) for _ in "kv"]

    with checked(), pytest.raises(DoubleStore, match="key_cache"):
        kv_append(key, key, *caches, torch.tensor([3, 3]))


def test_a_token_alone_equals_the_token_in_a_batch() -> None:
    key = normal(5, 2, 64)
    together, alone = ([torch.zeros(1, 8, 2, 64) for _ in "kv"] for _ in range(2))
    mapping = slots(5, 8)

    with checked():
        kv_append(key, key, *together, mapping)
        for token in range(5):
            one = slice(token, token + 1)
            kv_append(key[one], key[one], *alone, mapping[one])

    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1])


def test_a_cache_that_a_flatten_would_copy_is_refused() -> None:
    cache = torch.zeros(4, 2, 2, 3).transpose(0, 1)
    with pytest.raises(AssertionError, match="swallow"):
        kv_append(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), cache, cache, torch.tensor([0]))


def test_one_cache_for_both_is_refused() -> None:
    cache, key = torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 4)
    with checked(), pytest.raises(ContractError, match="key_cache must be apart from value_cache"):
        kv_append(key, key, cache, cache, torch.tensor([0]))


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128, 256])
def test_every_launch_of_bfloat16_has_its_variant(head_dim: int) -> None:
    dtype = torch.bfloat16
    key = torch.zeros(3, 2, head_dim, dtype=dtype)
    cache = torch.zeros(1, 4, 2, head_dim, dtype=dtype)
    mapping = torch.arange(3)

    assert_bundled(lambda: kv_append(key, key, cache, cache.clone(), mapping))
