"""Against the float64 specification, whatever is skipped; and what the certificate promises."""

import math

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
    """out, lse, skipped, masses and left_out."""
    masses, left_out = case.masses.clone(), case.left_out.clone()
    with checked():
        plan = tiered_plan(case.bounds, num_runs, case.formats)
        arguments = (*case.cache[:3], plan, case.formats, case.scale, case.skips, masses, left_out)
        results = tiered_skip(case.query, *arguments, case.reach, epsilon, torch.float32)
    return *results, masses, left_out


def expected(case: Skipping, epsilon: float) -> tuple[torch.Tensor, ...]:
    masses, left_out = case.masses.clone(), case.left_out.clone()
    arguments = (*case.cache, case.formats, case.scale, case.skips, masses, left_out)
    results = reference.tiered_skip(case.query, *arguments, case.reach, epsilon)
    return *results, masses, left_out


def assert_right(case: Skipping, epsilon: float, num_runs: int = 3) -> None:
    came, right = attended(case, epsilon, num_runs), expected(case, epsilon)
    for one, other, atol in zip(came, right, (ATOL, ATOL, 4e-3, 4e-3, 0), strict=True):
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
    skipped = attended(case, 0.999, num_runs)[2]
    assert skipped[0].isneginf().all()
    assert skipped[1].isfinite().all() == (share == 1.0)


def test_the_heaviest_are_read_after_all_of_heads_that_skip_too_much() -> None:
    """Of two KV heads one, by one of its two queries; the other stays as it is."""
    bounds = torch.tensor([[64, 704, 704, 720]]).int()
    case = skipping(bounds, 2, 4, 64, SERVED_FORMATS, share=0.8)
    case.query[0, 1] *= 4
    _, lse, skipped, masses, _ = attended(case, 0.9999)
    assert (torch.sigmoid(skipped - lse)[0] > 0.85).tolist() == [False, True, False, False]
    weights = (math.log(2) * masses[0, 0, :10] - lse[0, :2]).amax(-1)
    assert_right(case, 0.85)
    _, lse, skipped, _, left_out = attended(case, 0.85)
    assert torch.sigmoid(skipped - lse).max() <= 0.85
    assert torch.equal(left_out[0, 1], case.skips[0, 1])
    is_left, is_skipped = left_out[0, 0, :10].bool(), case.skips[0, 0, :10].bool()
    assert weights[is_left].max() < weights[is_skipped & ~is_left].min()
    assert_right(case, 0.0)
    *_, skipped, _, left_out = attended(case, 0.0)
    assert skipped.isneginf().all()
    assert not left_out[..., :10].any()


@pytest.mark.parametrize("num_runs", [1, 3])
def test_parts_have_limits_of_their_own(monkeypatch: pytest.MonkeyPatch, num_runs: int) -> None:
    """Of 11 blocks in three parts, the last one not a whole one, which come in tiles of two."""
    monkeypatch.setattr(reference, "PART", 4)
    monkeypatch.setattr(reference, "TILE", 2)
    bounds = torch.tensor([[64, 768, 768, 790], [0, 128, 128, 130]]).int()
    case = skipping(bounds, 1, 3, 64, INT4, share=0.9)
    assert_right(case, 0.85, num_runs)
    _, lse, skipped, _, left_out = attended(case, 0.85, num_runs)
    assert 0.3 < torch.sigmoid(skipped - lse)[0].max() <= 0.85
    for part in (slice(4), slice(4, 8), slice(8, 11)):
        assert 0 < left_out[0, 0, part].sum() < case.skips[0, 0, part].sum()


def test_values_that_are_skipped_are_not_read() -> None:
    case = skipping(bounds_of([700], warm=64), 1, 2, 64, INT4)
    chosen = case.cache.value_tables[0, 4:10].long()[case.skips[0, 0, :6].bool()]
    assert len(chosen)
    out, *_ = attended(case, 0.999)
    case.cache.slabs.value_meta[chosen] = float("nan")
    assert torch.equal(attended(case, 0.999)[0], out)
    assert attended(case, 0.0)[0].isnan().all()


def test_masses_bound_blocks_that_float32_has_no_exponent_for() -> None:
    case = skipping(bounds_of([700], warm=64), 1, 2, 64, SERVED_FORMATS)
    case.query[:] *= 60
    right = expected(case, 0.5)
    came = attended(case, 0.5)
    assert (right[3] - right[3][0, 0, :6].amax(0) < -130).any()
    assert came[3].isfinite()[:, :, :6].all()
    raised = 2 * case.query[0].float().norm(dim=-1) * case.scale * case.reach[0]
    assert (came[3] >= right[3] - 0.5 * raised / math.log(2))[:, :, :6].all()


@pytest.mark.parametrize("formats", FORMATS)
def test_what_is_read_weighs_next_to_nothing_beside_what_is_skipped(formats: Formats) -> None:
    """A block of all weight is skipped, and read after all; one is read at once, whose weight is
    2^-138 of that."""
    case = skipping(torch.tensor([[0, 448, 448, 448]]).int(), 1, 1, 64, formats)
    case.query[:] *= 60
    weights = expected(case, 0.0)[3][0, 0, :7, 0].double()
    case.query[:] *= -138 / (weights.min() - weights.max())  # of which float32 has no inverse
    for each in (case.skips, case.left_out):
        each[0, 0, :7] = (weights > weights.min()).int()
    out, lse, *_ = attended(case, 0.5, num_runs=1)
    right = expected(case, 0.5)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), right[0], rtol=1e-4, atol=0.02)
    torch.testing.assert_close(lse.double(), right[1], rtol=1e-4, atol=0.02)


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
    few = case._replace(
        skips=case.skips[:, :, :2].clone(),
        masses=case.masses[:, :, :2].clone(),
        left_out=case.left_out[:, :, :2].clone(),
    )
    with pytest.raises(DeviceAssertion, match="blocks that skips have no place for"):
        attended(few, 0.1)


def test_every_launch_of_a_served_model_has_its_variant() -> None:
    case = skipping(bounds_of([700, 0]), 2, 8, 128, SERVED_FORMATS)
    plan = tiered_plan(case.bounds, 3, case.formats)
    arguments = (*case.cache[:3], plan, case.formats, 0.1, *case[4:], 0.1)
    assert_bundled(lambda: tiered_skip(case.query, *arguments))
