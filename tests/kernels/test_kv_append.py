import pytest
import torch

from kernels.kv_append.api import kv_append


def test_tokens_land_in_their_slots_and_nowhere_else() -> None:
    key_cache = torch.full((3, 4, 2, 5), -7.0)
    value_cache = key_cache.clone()
    key = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    value = key + 1
    slots = torch.tensor([11, 0, 6])

    kv_append(key, value, key_cache, value_cache, slots)

    for cache, written in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[2, 3], written[0])
        assert torch.equal(cache[0, 0], written[1])
        assert torch.equal(cache[1, 2], written[2])
        assert cache.eq(-7.0).all(-1).all(-1).sum() == 9


def test_a_strided_source_is_read_right() -> None:
    cache = torch.zeros(1, 4, 2, 3)
    fused = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))

    kv_append(fused[:, 2:4], fused[:, 4:], cache, cache.clone(), torch.tensor([3, 1]))

    assert torch.equal(cache[0, [3, 1]], fused[:, 2:4])


def test_a_cache_that_a_flatten_would_copy_is_refused() -> None:
    cache = torch.zeros(4, 2, 2, 3).transpose(0, 1)
    with pytest.raises(AssertionError, match="swallow"):
        kv_append(torch.zeros(1, 2, 3), torch.zeros(1, 2, 3), cache, cache, torch.tensor([0]))
