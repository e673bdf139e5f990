"""Decode attention that skips: its reference's results, whatever is skipped, also in a graph whose
skips change, and a choice of skips that is its reference's."""

import pytest
import torch

from kernels.skip_list import reference as choice
from kernels.skip_list.api import skip_list
from kernels.tiered_decode.api import tiered_decode
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import FORMATS, Formats
from kernels.tiered_skip import reference
from kernels.tiered_skip.api import tiered_skip
from tests.kernels.gpu.compare import on_gpu
from tests.kernels.skipped_caches import Skipping, skipping
from tests.kernels.slab_caches import bounds_of

pytestmark = pytest.mark.gpu
LENGTHS = [1000, 0, 1, 64, 65, 130, 720, 1609]
ATOL = 2e-3
NEARLY_ALL = 1 - 1e-9
LONGEST = 20.0  # of 128 normal numbers


def arguments_of(case: Skipping, num_runs: int) -> tuple[object, ...]:
    slabs = Slabs(*on_gpu(list(case.cache.slabs)))
    key_tables, value_tables, bounds = on_gpu(list(case.cache[1:]))
    plan = tiered_plan(bounds, num_runs, case.formats)
    state = on_gpu([case.skips, case.masses, case.left_out, case.reach])
    return slabs, key_tables, value_tables, plan, case.formats, case.scale, *state


def assert_right(case: Skipping, epsilon: float, num_runs: int) -> None:
    """What is left out may differ from the reference's at a limit; results are of what was."""
    arguments = arguments_of(case, num_runs)
    results = tiered_skip(case.query.cuda(), *arguments, epsilon, torch.float32)
    masses, left_out = arguments[7].cpu(), arguments[8].cpu()
    right = expected(case, epsilon)
    assert (left_out != right[4]).sum() <= 0.02 * left_out.numel()
    assert ((left_out == 0) | (case.skips != 0)).all()
    out, lse, skipped = (each.cpu().double() for each in results)
    assert (torch.sigmoid(skipped - lse).nan_to_num() <= epsilon + 1e-4).all()

    right = expected(case._replace(skips=left_out), NEARLY_ALL)
    torch.testing.assert_close(out, right[0], rtol=1e-4, atol=ATOL)
    torch.testing.assert_close(lse, right[1], rtol=1e-4, atol=ATOL)
    torch.testing.assert_close(skipped, right[2], rtol=1e-4, atol=4e-3)
    torch.testing.assert_close(masses, right[3], rtol=1e-4, atol=4e-3, equal_nan=True)


def expected(case: Skipping, epsilon: float) -> tuple[torch.Tensor, ...]:
    """out, lse, skipped, masses and left_out."""
    masses, left_out = case.masses.clone(), case.skips.clone()
    others = (case.formats, case.scale, case.skips, masses, left_out, case.reach, epsilon)
    return *reference.tiered_skip(case.query, *case.cache, *others), masses, left_out


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size"),
    [(32, 8, 128), (9, 3, 64), (7, 1, 128), (16, 1, 64), (20, 2, 128), (2, 2, 64)],
)
@pytest.mark.parametrize("num_runs", [5, 132])
def test_equals_its_reference(
    num_runs: int, num_heads: int, num_kv_heads: int, size: int, formats: Formats, epsilon: float
) -> None:
    case = skipping(bounds_of(LENGTHS, warm=128), num_kv_heads, num_heads, size, formats)
    assert_right(case, epsilon, num_runs)


@pytest.mark.parametrize("formats", FORMATS)
def test_in_a_graph_whose_skips_change(formats: Formats) -> None:
    """As tiered_decode, where nothing is skipped; where all is, no more than is certified off."""
    case = skipping(bounds_of([3000, 1500], warm=128), 2, 8, 128, formats, share=0.7)
    arguments = arguments_of(case, 40)
    query, skips = case.query.cuda(), arguments[6]
    right, _ = tiered_decode(query, *arguments[:6], torch.float32)

    def step() -> tuple[torch.Tensor, ...]:
        return tiered_skip(query, *arguments, 0.02, torch.float32)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, skipped = step()
    skips.zero_()
    graph.replay()
    torch.testing.assert_close(out, right, rtol=0, atol=1e-5)
    assert skipped.isneginf().all()
    for buffer in (skips, arguments[8]):
        buffer.fill_(1)
    graph.replay()
    assert 0 < arguments[8].float().mean() < 1
    certified = torch.sigmoid(skipped - lse)
    assert certified.max() <= 0.02 + 1e-4
    assert ((out - right).norm(dim=-1) <= certified * 2 * LONGEST + ATOL).all()


def test_a_choice_is_its_references() -> None:
    generator = torch.Generator().manual_seed(1)
    masses = 4 * torch.randn(8, 4, 700, 5, generator=generator) - 3
    lse = 8 + torch.randn(8, 20, generator=generator)
    bounds = torch.tensor([[64, 64 * 690, 64 * 695, 64 * 698], [0, 64, 64, 90]]).int()
    for formats in FORMATS:
        came = skip_list(*on_gpu([masses, lse, bounds]), formats, 0.03).cpu()
        right = choice.skip_list(masses, lse, bounds, formats, 0.03)
        assert (came != right).sum() <= 2  # at the limit
