"""The theorem, and the bound of rounding: of any keys, values and skips, and of hostile ones."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.checked_interpreter import checked
from kernels.kv_quantise.layout import unpack_key_meta
from kernels.kv_quantise.reference import dequantised_keys, quantised_keys
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import FORMATS, Formats
from kernels.tiered_skip import reference
from kernels.tiered_skip.api import tiered_skip
from kernels.tiered_skip.rounding import SUM_ERROR, reach_of_blocks
from tests.kernels.skipped_caches import Skipping, skipping
from tests.kernels.slab_caches import slab_cache, tokens_of

BOUNDS = torch.tensor([[64, 448, 448, 460]]).int()


def case_of(
    formats: Formats, seed: int, share: float, loudness: float, offset: float, sharpness: float
) -> Skipping:
    """loudness: of one token of each block. offset: of all keys from zero."""
    keys = tokens_of(460, 1, 64, seed).float() + offset * tokens_of(1, 1, 64, seed + 1).float()
    keys[:, 7::64] *= loudness
    values = tokens_of(460, 1, 64, seed + 2)
    values[:, 64:448] += 3  # to one side, where a result without them cannot be
    cache = slab_cache(BOUNDS, 1, 64, formats, [keys.bfloat16()], [values])
    case = skipping(BOUNDS, 1, 3, 64, formats, share, cache)
    return case._replace(query=(sharpness * case.query).bfloat16())


CASES = st.builds(
    case_of,
    st.sampled_from(FORMATS),
    st.integers(0, 1000),
    st.floats(0.2, 1.0),
    st.sampled_from([1.0, 4.0, 16.0]),
    st.sampled_from([0.0, 1.0, 8.0]),
    st.sampled_from([0.2, 1.0, 4.0]),
)
EPSILONS = st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.99])


@settings(max_examples=12, deadline=None)
@given(CASES, EPSILONS)
def test_the_theorem(case: Skipping, epsilon: float) -> None:
    """Of the specification: shares are what is certified, less what is raised, errors are within
    their bound, and no head is certified for more than epsilon."""
    out, lse, skipped, _, left_out = specified(case, epsilon)
    whole, all_of_it, *_ = specified(case._replace(skips=torch.zeros_like(case.skips)), epsilon)
    certified = torch.sigmoid(skipped - lse)[0]
    share = 1 - (lse - all_of_it)[0].exp()
    raised = 2 * (case.query[0].double().norm(dim=-1) * case.scale * case.reach[0] + SUM_ERROR)
    assert (share <= certified + 1e-12).all()
    odds = (skipped - lse)[0].exp() / raised.exp()
    torch.testing.assert_close(share, odds / (1 + odds), rtol=1e-9, atol=1e-9)
    assert (certified <= epsilon + 1e-12).all()

    values = dequantised_values_of(case)
    is_left = left_out[0, 0, :6].bool().repeat_interleave(64)
    longest = values[64:448][is_left].norm(dim=-1).amax() if is_left.any() else 0.0
    error = (out - whole)[0].norm(dim=-1)
    assert (error <= certified * (longest + out[0].norm(dim=-1)) + 1e-9).all()


@settings(max_examples=5, deadline=None)
@given(CASES)
def test_kernels_masses_are_within_what_is_proven(case: Skipping) -> None:
    """Of float64 on the stored keys: neither below, nor by more than twice that above."""
    case = case._replace(skips=torch.zeros_like(case.skips))
    masses, left_out = case.masses.clone(), case.left_out.clone()
    with checked():
        plan = tiered_plan(case.bounds, 3, case.formats)
        arguments = (*case.cache[:3], plan, case.formats, case.scale, case.skips, masses, left_out)
        tiered_skip(case.query, *arguments, case.reach, 0.5)
    raised = specified(case, 0.5)[3][0, 0, :6]
    bound = (
        case.query[0].float().norm(dim=-1) * case.scale * case.reach[0] + SUM_ERROR
    ) / math.log(2)
    is_sharp = raised < raised.amax(0) - 90  # beyond what float32 has exponents for
    difference = masses[0, 0, :6] - raised
    assert (difference >= -bound - 1e-6).all()
    assert ((difference <= bound + 1e-6) | is_sharp).all()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.integers(0, 1000),
    st.floats(-14.0, 8.0),
    st.sampled_from([0.0, 3.0, 300.0]),
    st.floats(-20.0, 12.0),
)
def test_scaled_queries_in_float16_are_within_reach(
    bits: int, seed: int, exponent: float, offset: float, of_query: float
) -> None:
    """Steps 1 and 2 of the proof, of single keys; step 3 is of tensor cores."""
    keys = (
        tokens_of(64, 1, 64, seed)[0].float() * 2**exponent
        + offset * tokens_of(1, 1, 64, seed + 1)[0].float()
    )
    query = (tokens_of(5, 1, 64, seed + 2)[0].float() * 2**of_query).bfloat16().double()
    packed = quantised_keys(keys.bfloat16(), bits)
    exact = query @ dequantised_keys(packed, bits).T
    unit = 2.0 ** torch.floor(torch.log2(query.abs().amax(1, keepdim=True)) + 1)
    scales = unpack_key_meta(packed.meta[0, 0]).double()
    steps = dequantised_keys(packed, bits) / scales
    scaled = ((query / unit).half() * scales.half()).double()
    error = (unit * scaled @ steps.T - exact).abs()
    reach = reach_of_blocks(packed.meta[0], bits).double()
    assert (error <= query.norm(dim=1, keepdim=True) * reach).all()


def specified(case: Skipping, epsilon: float) -> tuple[torch.Tensor, ...]:
    masses, left_out = case.masses.double(), case.skips.clone()
    arguments = (*case.cache, case.formats, case.scale, case.skips, masses, left_out)
    results = reference.tiered_skip(case.query, *arguments, case.reach, epsilon)
    return *results, masses, left_out


def dequantised_values_of(case: Skipping) -> torch.Tensor:
    """[length, size]."""
    cache = case.cache
    bounds = cache.bounds[0].tolist()
    tables = cache.value_tables[0]
    return reference.dequantised(cache.slabs, tables, bounds, case.formats, is_keys=False)[0]
