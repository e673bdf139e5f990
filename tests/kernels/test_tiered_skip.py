"""Against the float64 specification, whatever is skipped; and what the certificate promises."""

import pytest
import torch

from kernels.checked_interpreter import checked
from kernels.errors import ContractError, DeviceAssertion
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import FORMATS, SERVED_FORMATS, Formats
from kernels.tiered_skip import reference
from kernels.tiered_skip.api import tiered_skip
from tests.kernels.launches import assert_bundled
from tests.kernels.skipped_caches import Skipping, skipping
from tests.kernels.slab_caches import bounds_of, tokens_of

# Of results of about 1: a weight and a scaled query are rounded to float16.
ATOL = 2e-3
INT4 = FORMATS[0]


@pytest.fixture(autouse=True)
def _scratch_is_poisoned():
    """What a run did not store is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def attended(case: Skipping, epsilon: float, num_runs: int = 3) -> tuple[torch.Tensor, ...]:
    """And the masses."""
    masses = torch.full_like(case.masses, float("nan"))
    with checked():
        plan = tiered_plan(case.bounds, num_runs, case.formats)
        arguments = (*case.cache[:3], plan, case.formats, case.scale, case.skips)
        results = tiered_skip(case.query, *arguments, masses, case.reach, epsilon, torch.float32)
    return *results, masses


def expected(case: Skipping, epsilon: float) -> tuple[torch.Tensor, ...]:
    masses = torch.full_like(case.masses, float("nan"))
    arguments = (*case.cache, case.formats, case.scale, case.skips, masses, case.reach, epsilon)
    return *reference.tiered_skip(case.query, *arguments), masses


def assert_right(case: Skipping, epsilon: float, num_runs: int = 3) -> None:
    came, right = attended(case, epsilon, num_runs), expected(case, epsilon)
    for one, other, atol in zip(came, right, (ATOL, ATOL, 4e-3, 4e-3), strict=True):
        torch.testing.assert_close(
            one.double(), other.double(), rtol=1e-4, atol=atol, equal_nan=True
        )


@pytest.mark.parametrize(("size", "formats"), [*((64, each) for each in FORMATS), (128, INT4)])
def test_skips_of_unequal_lengths(size: int, formats: Formats) -> None:
    case = skipping(bounds_of([600, 0, 1, 130], warm=192), 2, 4, size, formats)
    assert_right(case, 0.999, num_runs=4)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (7, 1), (9, 1), (32, 2)])
def test_groups_of_heads(num_heads: int, num_kv_heads: int) -> None:
    assert_right(skipping(bounds_of([300], warm=64), num_kv_heads, num_heads, 64, INT4), 0.999)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("num_runs", [1, 7, 50])
def test_all_or_nothing(num_runs: int, share: float) -> None:
    """Of a tier that is cold alone nothing then is attended to."""
    bounds = torch.tensor([[0, 448, 448, 448], [64, 128, 128, 130]]).int()
    case = skipping(bounds, 1, 2, 64, INT4, share)
    assert_right(case, 0.999, num_runs)
    _, _, skipped, _ = attended(case, 0.999, num_runs)
    assert skipped[0].isneginf().all()
    assert skipped[1].isfinite().all() == (share == 1.0)


def test_nothing_is_skipped_of_heads_that_would_lose_too_much() -> None:
    """Of two KV heads one, by one of its two queries; the other stays as it is."""
    case = skipping(bounds_of([700], warm=64), 2, 4, 64, SERVED_FORMATS, share=0.3)
    case.query[0, 2] *= 4
    _, lse, skipped, _ = attended(case, 0.999)
    shares = torch.sigmoid(skipped - lse)[0]
    bar = float(shares.sort().values[2:].mean())
    assert (shares > bar).tolist().count(True) == 1
    assert_right(case, bar)
    _, _, skipped, _ = attended(case, bar)
    again = (shares > bar).view(2, 2).any(1, keepdim=True).expand(2, 2).flatten()
    assert torch.equal(skipped[0].isneginf(), again)
    assert_right(case, 0.0)
    assert attended(case, 0.0)[2].isneginf().all()


def test_values_that_are_skipped_are_not_read() -> None:
    case = skipping(bounds_of([700], warm=64), 1, 2, 64, INT4)
    chosen = case.cache.value_tables[0, 4:10].long()[case.skips[0, 0, :6].bool()]
    assert len(chosen)
    out, *_ = attended(case, 0.999)
    case.cache.slabs.value_meta[chosen] = float("nan")
    assert torch.equal(attended(case, 0.999)[0], out)
    assert attended(case, 0.0)[0].isnan().all()


def test_part_of_a_projection() -> None:
    case = skipping(bounds_of([200, 70]), 2, 4, 64, INT4)
    query = tokens_of(2, 9, 64, seed=9).transpose(0, 1)[:, 3:7]
    assert_right(case._replace(query=query), 0.999)


@pytest.mark.parametrize("epsilon", [-0.1, 1.0])
def test_what_no_certificate_can_be_of_is_refused(epsilon: float) -> None:
    case = skipping(bounds_of([200]), 1, 1, 64, INT4)
    with pytest.raises(ContractError, match="epsilon must be from 0 on and below 1, came"):
        attended(case, epsilon)


def test_heads_of_other_sizes_are_refused() -> None:
    case = skipping(bounds_of([64]), 1, 1, 256, INT4)
    with pytest.raises(ContractError, match="of heads of 64 or 128, came 256"):
        attended(case, 0.1)


def test_too_few_places_for_blocks_are_noticed() -> None:
    case = skipping(bounds_of([500], warm=64), 1, 1, 64, INT4)
    few = case._replace(skips=case.skips[:, :, :2].clone(), masses=case.masses[:, :, :2].clone())
    with pytest.raises(DeviceAssertion, match="blocks that skips have no place for"):
        attended(few, 0.1)


def test_every_launch_of_a_served_model_has_its_variant() -> None:
    case = skipping(bounds_of([700, 0]), 2, 8, 128, SERVED_FORMATS)
    plan = tiered_plan(case.bounds, 3, case.formats)
    arguments = (*case.cache[:3], plan, case.formats, 0.1, case.skips, case.masses, case.reach, 0.1)
    assert_bundled(lambda: tiered_skip(case.query, *arguments))
