"""Turned, rotated and appended on a GPU: the reference's bits, whatever the heads, the strides and
the batch, and places beyond 2^31."""

import pytest
import torch

from kernels.tiered_append import reference
from kernels.tiered_append.api import tiered_append
from tests.kernels.appended_tokens import Appended, appended
from tests.kernels.gpu.compare import assert_gpu_equals_reference, on_gpu

pytestmark = pytest.mark.gpu
INT32_MAX = 2**31 - 1


def appended_on_gpu(*sizes: int) -> Appended:
    return Appended(*on_gpu(list(appended(*sizes))))


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "size"),
    [
        (1, 1, 1, 64),
        (65, 32, 8, 128),
        (7, 9, 3, 64),
        (3, 17, 17, 64),
        (2, 3, 9, 128),
        (3, 5, 5, 256),
        (0, 2, 1, 128),
    ],
)
def test_equals_its_reference(
    num_tokens: int, num_heads: int, num_kv_heads: int, size: int
) -> None:
    arguments = appended(num_tokens, num_heads, num_kv_heads, size, num_slabs=9)
    assert_gpu_equals_reference(tiered_append, reference.tiered_append, *arguments)


@pytest.mark.parametrize("size", [64, 128])
def test_channels_of_very_different_sizes(size: int) -> None:
    arguments = appended(33, 8, 2, size)
    exponents = torch.exp2(torch.arange(size) % 61 - 30).bfloat16()
    for heads in (arguments.query, arguments.key):
        heads.mul_(exponents)
    assert_gpu_equals_reference(tiered_append, reference.tiered_append, *arguments)


@pytest.mark.parametrize("size", [64, 128])
def test_a_token_has_the_same_bits_in_any_batch(size: int) -> None:
    together = appended_on_gpu(100, 12, 4, size, 9)
    result = tiered_append(*together)

    for start, count in [(0, 1), (99, 1), (0, 2), (3, 16), (16, 33), (1, 99)]:
        rows = slice(start, start + count)
        alone = appended_on_gpu(100, 12, 4, size, 9)
        heads, slots = ([each[rows] for each in part] for part in (alone[:5], alone[7:]))
        slabs = [alone.key_slabs, alone.value_slabs]
        assert torch.equal(tiered_append(*heads, *slabs, *slots), result[rows])
        for ours, theirs, mapping in zip(slabs, together[5:7], slots, strict=True):
            stored = mapping[mapping >= 0]
            places = [each.view(torch.int16).view(-1, 4 * size)[stored] for each in (ours, theirs)]
            assert torch.equal(*places)


def test_a_graph_follows_its_slots() -> None:
    arguments = appended_on_gpu(16, 8, 2, 128)
    expected = appended_on_gpu(16, 8, 2, 128)
    tiered_append(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tiered_append(*arguments)

    for slots in (*arguments[7:], *expected[7:]):
        slots.copy_(torch.where(slots < 0, slots, 63 - slots))
    for slabs in (*arguments[5:7], *expected[5:7]):
        slabs.zero_()
    graph.replay()

    assert torch.equal(result, tiered_append(*expected))
    assert torch.equal(arguments.key_slabs, expected.key_slabs)
    assert torch.equal(arguments.value_slabs, expected.value_slabs)


def test_at_the_end_of_huge_arenas() -> None:
    num_slabs = 2**17 + 1
    near = appended_on_gpu(2, 9, 8, 128)
    arenas = torch.zeros(2, num_slabs, 8, 32 * 128, device="cuda", dtype=torch.uint8)
    assert arenas[0].numel() // 2 > INT32_MAX
    far_slots = torch.tensor([[16 * num_slabs - 1, 0], [5, 16 * num_slabs - 2]], device="cuda")
    near_slots = torch.tensor([[63, 0], [5, 62]], device="cuda")

    far_query = tiered_append(*near[:5], *arenas, *far_slots)
    assert torch.equal(far_query, tiered_append(*near[:7], *near_slots))

    for ours, far, theirs, place in zip(arenas, far_slots, near[5:7], near_slots, strict=True):
        far_tokens, near_tokens = (each.view(torch.int16).view(-1, 1024) for each in (ours, theirs))
        stored = far_tokens[far]
        assert torch.equal(stored, near_tokens[place])
        assert far_tokens.count_nonzero() == stored.count_nonzero()
