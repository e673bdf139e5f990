"""Blocks become pages on a GPU: exactly the reference's, thousands in a launch, and beyond 2^31."""

import pytest
import torch

from kernels.kv_quantise.reference import SIZES
from tests.kernels.gpu.compare import assert_gpu_equals_reference, on_gpu
from tests.kernels.restored_blocks import FORMS, RESTORES, stored

pytestmark = pytest.mark.gpu
INT32_MAX = 2**31 - 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("bits", "grain"), FORMS)
@pytest.mark.parametrize("kind", RESTORES)
def test_equals_its_reference(kind: str, bits: int, grain: int, size: int) -> None:
    assert_gpu_equals_reference(*RESTORES[kind], *stored(kind, bits, grain, size, num_blocks=40))


@pytest.mark.parametrize("kind", RESTORES)
def test_thousands_of_blocks_and_tables_of_any_kind(kind: str) -> None:
    slabs, meta, sources, pages, targets, bits = stored(kind, 8, 2, 64, num_blocks=2049)
    for dtype in (torch.int32, torch.int64):
        tables = sources[1:], pages.clone(), targets.to(dtype)[1:]
        assert_gpu_equals_reference(*RESTORES[kind], slabs, meta, *tables, bits)


@pytest.mark.parametrize("kind", RESTORES)
def test_at_the_end_of_huge_pages(kind: str) -> None:
    slabs, meta, sources, pages, targets, bits = on_gpu(stored(kind, 4, 1, 128))
    num_pages = 2**17 + 1
    far = torch.zeros(num_pages, 64, 2, 128, device="cuda", dtype=torch.bfloat16)
    assert far.numel() > INT32_MAX
    restore = RESTORES[kind][0]

    restore(slabs, meta, sources, pages, targets, bits)
    ends = torch.tensor([num_pages - 1, 0], device="cuda")
    restore(slabs, meta, sources, far, ends, bits)

    restored = pages[targets.long()]
    assert torch.equal(far[ends], restored)
    assert far.count_nonzero() == restored.count_nonzero()


@pytest.mark.parametrize("kind", RESTORES)
def test_a_graph_follows_its_tables(kind: str) -> None:
    slabs, meta, sources, pages, targets, bits = on_gpu(stored(kind, 8, 1, 128))
    restore = RESTORES[kind][0]
    restore(slabs, meta, sources, pages, targets, bits)
    expected = pages.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        restore(slabs, meta, sources, pages, targets, bits)

    sources.copy_(sources.flip(0))
    graph.replay()

    restored, swapped = pages[targets.long()], expected[targets.flip(0).long()]
    assert torch.equal(restored, swapped)
