"""Three launches: the greatest logit of each group of tokens; of each span of tokens its mass, and
the few that may be the last one kept by top-k or top-p; then one program a row filters and draws.

How far a token lies below the greatest is its depth: the bits of the float32 (greatest - logit) /
temperature, whose order as int32 is that of the floats. A filter keeps depths up to some number.
"""

import triton
import triton.language as tl

from kernels.kernel import kernel, variants
from kernels.sampling import reference, uniform
from kernels.sampling.reference import (
    DRAW_CONTRACT,
    DRAW_METAS,
    GREATEST_CONTRACT,
    GREATEST_META,
    WEIGH_CONTRACT,
    WEIGH_METAS,
)

GROUP = tl.constexpr(reference.GROUP)
SPAN = tl.constexpr(reference.SPAN)
GROUPS_OF_SPAN = tl.constexpr(reference.SPAN // reference.GROUP)
WORD = tl.constexpr(reference.WORD)
MIN_TEMPERATURE = tl.constexpr(reference.MIN_TEMPERATURE)
DEEPEST = tl.constexpr(0x7F7FFFFF)  # of the greatest finite float
NOWHERE = tl.constexpr(0x7F800000)  # of infinity: no candidate
FOUR = tl.constexpr(4)  # candidates that are loaded, and first added, together
RANK_STEPS = tl.constexpr(16)
TINY = tl.constexpr(1e-300)  # a part of any mass
GAMMA = tl.constexpr(uniform.GAMMA)
FIRST_MULTIPLIER = tl.constexpr(uniform.MULTIPLIERS[0])
SECOND_MULTIPLIER = tl.constexpr(uniform.MULTIPLIERS[1])
FIRST_SHIFT = tl.constexpr(uniform.SHIFTS[0])
SECOND_SHIFT = tl.constexpr(uniform.SHIFTS[1])
THIRD_SHIFT = tl.constexpr(uniform.SHIFTS[2])


@triton.jit
def logits_of(logits_ptr, mask_ptr, row, token, is_masked, words, vocab):
    """-inf where there is no such token, where the mask forbids it, and in the place of NaN."""
    logit = tl.load(logits_ptr + row * vocab + token, mask=token < vocab, other=float("-inf"))
    if is_masked != 0:
        word = tl.load(mask_ptr + row * words + token // WORD, mask=token < vocab, other=0)
        logit = tl.where(((word >> (token % WORD)) & 1) != 0, logit, float("-inf"))
    return tl.where(logit > float("-inf"), logit, float("-inf"))


@triton.jit
def greatest_of_groups(greatest_ptr, row, groups, GROUPS: tl.constexpr):
    group = tl.arange(0, GROUPS)
    found = greatest_ptr + row * groups + group
    return tl.load(found, mask=group < groups, other=float("-inf"))


@triton.jit
def depths_of(logit, greatest, temperature):
    below = tl.div_rn(greatest - logit, tl.maximum(temperature, MIN_TEMPERATURE))
    return tl.where(below >= 0, below.to(tl.int32, bitcast=True), NOWHERE)


@triton.jit
def mass_of(depth):
    return tl.exp(-depth.to(tl.float32, bitcast=True))


@triton.jit
def depth_of_min_p(min_p):
    floor = tl.maximum(0.0 - tl.log(min_p.to(tl.float64)), 0.0).to(tl.float32)
    return tl.minimum(floor.to(tl.int32, bitcast=True), DEEPEST)


@triton.jit
def depth_of_rank(depth, rank):
    """Some depth up to which there are `rank` of these, one not much deeper than it must be."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), DEEPEST, tl.int32)
    for _ in range(RANK_STEPS):
        middle = low + (high - low) // 2
        is_enough = tl.sum((depth <= middle).to(tl.int32)) >= rank
        low = tl.where(is_enough, low, middle)
        high = tl.where(is_enough, middle, high)
    return high


@triton.jit
def depth_of_top_p(top_p, vocab):
    """What lies deeper weighs less than 1 - top_p, were it the whole vocabulary."""
    floor = 1.0 + tl.log(tl.cast(vocab, tl.float32) / (1.0 - top_p))
    return floor.to(tl.int32, bitcast=True)


@triton.jit
def mixed(state):
    state = (state ^ (state >> FIRST_SHIFT)) * FIRST_MULTIPLIER
    state = (state ^ (state >> SECOND_SHIFT)) * SECOND_MULTIPLIER
    return state ^ (state >> THIRD_SHIFT)


@triton.jit
def uniform_of(seed, position):
    """int64 -> float64, as `uniform.counter_uniform`."""
    key = mixed(seed.to(tl.uint64, bitcast=True) + GAMMA)
    step = (position.to(tl.uint64, bitcast=True) + 1) * GAMMA
    return (mixed(key + step) >> 11).to(tl.int64).to(tl.float64) * 2.0**-53


@kernel(contract=GREATEST_CONTRACT, variants=variants({}, [GREATEST_META]))
def sample_greatest_kernel(logits_ptr, mask_ptr, greatest_ptr, is_masked, words, groups, vocab):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    logit = logits_of(logits_ptr, mask_ptr, row, token, is_masked, words, vocab)
    greatest = tl.max(tl.reshape(logit, (GROUPS_OF_SPAN, GROUP)), axis=1)
    group = tl.program_id(0) * GROUPS_OF_SPAN + tl.arange(0, GROUPS_OF_SPAN)
    tl.store(greatest_ptr + row * groups + group, greatest, mask=group < groups)


@kernel(
    contract=WEIGH_CONTRACT,
    variants=variants({}, WEIGH_METAS, unaligned_metas=WEIGH_METAS[-1:]),
)
def sample_weigh_kernel(
    logits_ptr,
    mask_ptr,
    greatest_ptr,
    floats_ptr,
    numbers_ptr,
    masses_ptr,
    counts_ptr,
    candidates_ptr,
    is_masked,
    words,
    groups,
    spans,
    vocab,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    span = tl.program_id(0)
    temperature = tl.load(floats_ptr + row * 3)
    if temperature <= 0.0:
        return
    # Loaded together, before anything waits.
    token = span * SPAN + tl.arange(0, SPAN)
    logit = logits_of(logits_ptr, mask_ptr, row, token, is_masked, words, vocab)
    of_groups = greatest_of_groups(greatest_ptr, row, groups, GROUPS)
    min_p = tl.load(floats_ptr + row * 3 + 1)
    top_k = tl.load(numbers_ptr + row * 2)
    top_p = tl.load(floats_ptr + row * 3 + 2)

    greatest = tl.max(of_groups)
    depth = depths_of(logit, greatest, temperature)
    kept = depth_of_min_p(min_p)
    mass = tl.where(depth <= kept, mass_of(depth), 0.0)
    place = row * spans + span
    tl.store(masses_ptr + place, tl.sum(mass.to(tl.float64)))
    if (top_k > 0) | (top_p < 1.0):
        if top_k > 0:
            deepest = depth_of_rank(depths_of(of_groups, greatest, temperature), top_k)
        else:
            deepest = depth_of_top_p(top_p, vocab)
        is_candidate = (depth <= tl.minimum(kept, deepest)).to(tl.int32)
        count = tl.sum(is_candidate)
        found = candidates_ptr + place * SPAN
        tl.store(found + tl.cumsum(is_candidate) - 1, depth, mask=is_candidate != 0)
        after = count + tl.arange(0, FOUR)
        tl.store(found + after, NOWHERE, mask=after < tl.cdiv(count, FOUR) * FOUR)
        tl.store(counts_ptr + place, count)


@triton.jit
def candidates_at(row_ptr, counts, start, WIDTH: tl.constexpr):
    """Depths [spans, WIDTH] of the candidates from `start` on of each span, else NOWHERE."""
    span = tl.arange(0, counts.shape[0])[:, None]
    place = start + tl.arange(0, WIDTH)[None, :]
    is_found = place // FOUR < tl.cdiv(counts, FOUR)[:, None]  # so that four are loaded at once
    return tl.load(row_ptr + span * SPAN + place, mask=is_found, other=NOWHERE)


@triton.jit
def in_fours(values):
    return tl.reshape(values, (values.shape[0], values.shape[1] // FOUR, FOUR))


@triton.jit
def weight_to(depth, weight, deepest):
    """Four are added in float32: that moves a sum less than their exponentials' own errors."""
    return tl.sum(in_fours(tl.where(depth <= deepest, weight, 0.0)), axis=2).to(tl.float64)


@triton.jit
def last_kept(row_ptr, counts, deepest, target, IS_COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """The least depth up to which candidates weigh `target` or more: as many, or their mass.

    What is kept up to `low` weighs less, up to `high` as much or all that there is. Each pass cuts
    what is between into quarters, and ends where one value alone is left.
    """
    most = tl.max(counts)
    low = tl.full((), -1, tl.int32)
    high = deepest
    while low + 1 < high:
        quarter = (high - low) // 4
        second = low + (high - low) // 2
        first, third = low + quarter, second + quarter
        of_first = tl.zeros((counts.shape[0], WIDTH // FOUR), tl.float64)
        of_second = tl.zeros((counts.shape[0], WIDTH // FOUR), tl.float64)
        of_third = tl.zeros((counts.shape[0], WIDTH // FOUR), tl.float64)
        least = tl.full((counts.shape[0], WIDTH // FOUR), NOWHERE, tl.int32)
        greatest = tl.full((counts.shape[0], WIDTH // FOUR), -1, tl.int32)
        for start in range(0, most, WIDTH):
            depth = candidates_at(row_ptr, counts, start, WIDTH)
            weight = tl.full(depth.shape, 1.0, tl.float32) if IS_COUNT else mass_of(depth)
            of_first += weight_to(depth, weight, first)
            of_second += weight_to(depth, weight, second)
            of_third += weight_to(depth, weight, third)
            above = tl.where(depth > low, depth, NOWHERE)
            below = tl.where(depth <= high, depth, -1)
            least = tl.minimum(least, tl.min(in_fours(above), axis=2))
            greatest = tl.maximum(greatest, tl.max(in_fours(below), axis=2))
        nearest, farthest = tl.min(least), tl.max(greatest)
        is_first = tl.sum(of_first) >= target
        is_second = tl.sum(of_second) >= target
        is_third = tl.sum(of_third) >= target
        next_low = tl.where(is_first, low, tl.where(is_second, first, second))
        next_high = tl.where(is_first, first, tl.where(is_second, second, third))
        low = tl.where(is_third, next_low, third)
        high = tl.minimum(tl.where(is_third, next_high, high), farthest)
        low = tl.where(nearest >= farthest, high, tl.maximum(low, nearest - 1))
    return high


@triton.jit
def masses_to(row_ptr, counts, deepest, WIDTH: tl.constexpr):
    """Of each span's candidates up to a depth, [spans] float64."""
    masses = tl.zeros((counts.shape[0],), tl.float64)
    for start in range(0, tl.max(counts), WIDTH):
        depth = candidates_at(row_ptr, counts, start, WIDTH)
        mass = tl.where(depth <= deepest, mass_of(depth), 0.0)
        masses += tl.sum(mass.to(tl.float64), axis=1)
    return masses


@triton.jit
def first_past(mass, cumulated, target):
    """The first place whose cumulated mass exceeds the target; the last one of any mass, if the
    sums' rounding leaves none; -1 without any mass."""
    place = tl.arange(0, mass.shape[0])
    has_mass = mass > 0.0
    past = tl.min(tl.where(has_mass & (cumulated > target), place, mass.shape[0]))
    return tl.minimum(past, tl.max(tl.where(has_mass, place, -1)))


@kernel(
    contract=DRAW_CONTRACT,
    variants=variants({}, DRAW_METAS, unaligned_metas=DRAW_METAS[-1:]),
)
def sample_draw_kernel(
    logits_ptr,
    mask_ptr,
    greatest_ptr,
    floats_ptr,
    numbers_ptr,
    positions_ptr,
    masses_ptr,
    counts_ptr,
    candidates_ptr,
    token_ids_ptr,
    is_masked,
    words,
    groups,
    spans,
    vocab,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(floats_ptr + row * 3)
    min_p = tl.load(floats_ptr + row * 3 + 1)
    top_k = tl.load(numbers_ptr + row * 2)
    top_p = tl.load(floats_ptr + row * 3 + 2)
    of_groups = greatest_of_groups(greatest_ptr, row, groups, GROUPS)
    greatest = tl.max(of_groups)
    group = tl.min(tl.where(of_groups == greatest, tl.arange(0, GROUPS), GROUPS))
    in_group = group * GROUP + tl.arange(0, GROUP)
    logit = logits_of(logits_ptr, mask_ptr, row, in_group, is_masked, words, vocab)
    token_id = tl.min(tl.where(logit == greatest, in_group, vocab))

    if temperature > 0.0:
        kept = depth_of_min_p(min_p)
        span = tl.arange(0, GROUPS // GROUPS_OF_SPAN)
        masses = tl.load(masses_ptr + row * spans + span, mask=span < spans, other=0.0)
        if (top_k > 0) | (top_p < 1.0):
            row_ptr = candidates_ptr + row * spans * SPAN
            counts = tl.load(counts_ptr + row * spans + span, mask=span < spans, other=0)
            if (top_k > 0) & (top_k <= tl.sum(counts)):
                target = top_k.to(tl.float64)
                kept = last_kept(row_ptr, counts, kept, target, True, WIDTH)
                masses = masses_to(row_ptr, counts, kept, WIDTH)
            if top_p < 1.0:
                target = tl.maximum(top_p.to(tl.float64) * tl.sum(masses), TINY)
                kept = last_kept(row_ptr, counts, kept, target, False, WIDTH)
                masses = masses_to(row_ptr, counts, kept, WIDTH)

        seed = tl.load(numbers_ptr + row * 2 + 1)
        uniform = uniform_of(seed, tl.load(positions_ptr + row))
        target = uniform * tl.sum(masses)
        cumulated = tl.cumsum(masses)
        drawn = first_past(masses, cumulated, target)
        if drawn >= 0:
            before = tl.sum(tl.where(span == drawn - 1, cumulated, 0.0))
            in_span = drawn * SPAN + tl.arange(0, SPAN)
            of_span = logits_of(logits_ptr, mask_ptr, row, in_span, is_masked, words, vocab)
            depth = depths_of(of_span, greatest, temperature)
            mass = tl.where(depth <= kept, mass_of(depth), 0.0).to(tl.float64)
            place = first_past(mass, before + tl.cumsum(mass), target)
            token_id = drawn * SPAN + tl.maximum(place, 0)
    tl.store(token_ids_ptr + row, token_id.to(tl.int64))
