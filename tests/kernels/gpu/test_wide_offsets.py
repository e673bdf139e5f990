"""More than 2^31 elements: an offset in int32 would wrap around."""

import pytest
import torch

from kernels.kv_append.api import kv_append
from kernels.rope_append.api import rope_append
from kernels.silu_mul import reference as silu_mul_reference
from kernels.silu_mul.api import silu_mul

pytestmark = pytest.mark.gpu
INT32_MAX = 2**31 - 1


def test_silu_mul_of_a_huge_batch() -> None:
    size = 2**14
    gate_up = torch.randn(2**16 + 1, 2 * size, device="cuda", dtype=torch.bfloat16)
    assert gate_up.numel() > INT32_MAX

    product = silu_mul(gate_up)

    for row in (0, 2**15, 2**16):
        expected = silu_mul_reference.silu_mul(gate_up[row : row + 1].cpu())
        torch.testing.assert_close(product[row : row + 1].cpu(), expected, rtol=2**-6, atol=1e-7)


def test_kv_append_at_the_end_of_a_huge_cache() -> None:
    num_blocks = 2**17 + 1
    caches = torch.zeros(2, num_blocks, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    assert caches[0].numel() > INT32_MAX
    key = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    last = num_blocks * 16 - 1

    kv_append(key, -key, *caches, torch.tensor([last, 0], device="cuda"))

    for cache, written in zip(caches, (key, -key), strict=True):
        assert torch.equal(cache[-1, -1], written[0])
        assert torch.equal(cache[0, 0], written[1])
        assert cache.count_nonzero() == written.count_nonzero()


def test_rope_append_at_the_end_of_a_huge_cache() -> None:
    num_blocks = 2**17 + 1
    caches = torch.zeros(2, num_blocks, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(2, 9, 128, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
    half_turn = torch.full((2, 1, 128), -1.0, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([num_blocks * 16 - 1, 0], device="cuda")

    turned = rope_append(query, key, key, half_turn, torch.zeros_like(half_turn), *caches, slots)

    assert torch.equal(turned, -query)
    for cache, written in zip(caches, (-key, key), strict=True):
        assert torch.equal(cache[-1, -1], written[0])
        assert torch.equal(cache[0, 0], written[1])
        assert cache.count_nonzero() == written.count_nonzero()
