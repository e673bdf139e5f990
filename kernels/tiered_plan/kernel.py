"""A program makes some records, and looks at the bounds of all sequences for them."""

import triton
import triton.language as tl

from kernels.kernel import kernel, variants
from kernels.tiered_plan import reference
from kernels.tiered_plan.reference import CONTRACT

SEQUENCE = tl.constexpr(reference.SEQUENCE)
RUN = tl.constexpr(reference.RUN)
NO_RUN = tl.constexpr(reference.NO_RUN)
CHANGE_COST = tl.constexpr(reference.CHANGE_COST)
SPARED = tl.constexpr(reference.SPARED)
CANDIDATES = tl.constexpr(reference.CANDIDATES)
FIRST_TOKEN_SLAB = tl.constexpr(reference.FIRST_TOKEN_SLAB)
FIRST_COLD = tl.constexpr(reference.FIRST_COLD)
FIRST_WARM = tl.constexpr(reference.FIRST_WARM)
SINK_SLABS = tl.constexpr(reference.SINK_SLABS)
KEY_SKIP = tl.constexpr(reference.KEY_SKIP)
VALUE_SKIP = tl.constexpr(reference.VALUE_SKIP)
NUM_TOKENS = tl.constexpr(reference.NUM_TOKENS)
WARM_BLOCKS = tl.constexpr(reference.WARM_BLOCKS)
FIRST_RUN = tl.constexpr(reference.FIRST_RUN)
NUM_RUNS = tl.constexpr(reference.NUM_RUNS)
TURN = tl.constexpr(reference.TURN)
RECORD_SIZE = tl.constexpr(reference.RECORD_SIZE)
LAST_TOKEN_SLAB = tl.constexpr(reference.LAST_TOKEN_SLAB)
LAST_COLD = tl.constexpr(reference.LAST_COLD)
LAST_WARM = tl.constexpr(reference.LAST_WARM)


@triton.jit
def steps_of(bounds_ptr, sequence, mask, VALUE_BITS: tl.constexpr):
    """Slabs of bfloat16, cold blocks, warm blocks."""
    sink = tl.load(bounds_ptr + 4 * sequence, mask=mask, other=0)
    cold = tl.load(bounds_ptr + 4 * sequence + 1, mask=mask, other=0)
    warm = tl.load(bounds_ptr + 4 * sequence + 2, mask=mask, other=0)
    length = tl.load(bounds_ptr + 4 * sequence + 3, mask=mask, other=0)
    if VALUE_BITS == 8:
        cold = warm
    return sink // 16 + tl.cdiv(length - warm, 16), (cold - sink) // 64, (warm - cold) // 64


@triton.jit
def costs_of(bounds_ptr, sequence, mask, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr):
    tokens, cold, warm = steps_of(bounds_ptr, sequence, mask, VALUE_BITS)
    return start_of_codes(tokens, cold, warm) + (KEY_BITS // 4 + VALUE_BITS // 4) * cold + 4 * warm


@triton.jit
def start_of_codes(tokens, cold, warm):
    """What a sequence costs up to its cold and warm blocks."""
    return 2 * tokens + tl.where((tokens > 0) & (cold + warm > 0), CHANGE_COST, 0)


@triton.jit
def share_of_a_run(
    bounds_ptr,
    sequences,
    runs,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """What a run takes, and what a sequence's cost is rounded up to a multiple of: the same where
    no run is to go on in a second sequence."""
    whole = tl.zeros((SEQUENCES,), tl.int32)
    for start in range(0, sequences, SEQUENCES):
        each = start + tl.arange(0, SEQUENCES)
        whole += costs_of(bounds_ptr, each, each < sequences, KEY_BITS, VALUE_BITS)
    least = tl.maximum(tl.cdiv(tl.sum(whole), runs), 1)
    most = tl.maximum(tl.cdiv(tl.sum(whole), runs - runs // SPARED), 1)
    step = tl.maximum(tl.cdiv(most - least, CANDIDATES), 1)
    enough = least + step * tl.arange(0, CANDIDATES)
    pieces = tl.zeros((SEQUENCES, CANDIDATES), tl.int32)
    for start in range(0, sequences, SEQUENCES):
        each = start + tl.arange(0, SEQUENCES)
        costs = costs_of(bounds_ptr, each, each < sequences, KEY_BITS, VALUE_BITS)
        pieces += tl.cdiv(costs[:, None], enough[None, :])
    is_enough = tl.sum(pieces, 0) <= runs
    found = tl.min(tl.where(is_enough, enough, most + 1), 0)
    fits = found <= most
    return tl.where(fits, found, most), tl.where(fits, found, 1)


@triton.jit
def waiting_before(
    bounds_ptr,
    row,
    own,
    sequences,
    per_run,
    unit,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """How many sequences' own records take more than `own` of `row`, or as much, before it."""
    before = tl.zeros(row.shape, tl.int32)
    before_all = 0
    for start in range(0, sequences, SEQUENCES):
        each = start + tl.arange(0, SEQUENCES)
        costs = costs_of(bounds_ptr, each, each < sequences, KEY_BITS, VALUE_BITS)
        costs = tl.cdiv(costs, unit) * unit
        gone = (before_all + tl.cumsum(costs, 0) - costs) % per_run
        others = tl.where(gone > 0, tl.minimum(costs, per_run - gone), 0)
        is_first = each[None, :] < row[:, None]
        is_before = (others[None, :] > own[:, None]) | (others[None, :] == own[:, None]) & is_first
        before += tl.sum((is_before & (each < sequences)[None, :]).to(tl.int32), 1)
        before_all += tl.sum(costs)
    return before


@triton.jit
def store_steps(field_ptr, begin, end, at, cost, num, mask):
    """Those steps, of `cost` each from `at` on, that begin from `begin` to `end`."""
    first = tl.minimum(tl.cdiv(tl.maximum(begin - at, 0), cost), num)
    last = tl.minimum(tl.cdiv(tl.maximum(end - at, 0), cost), num)
    tl.store(field_ptr, first, mask=mask)
    tl.store(field_ptr + 1, last, mask=mask)


@kernel(
    contract=CONTRACT,
    variants=variants(
        {},
        [reference.meta_of(reference.SERVED_FORMATS)],
        aligned=[True],
    ),
)
def tiered_plan_kernel(
    bounds_ptr,
    plan_ptr,
    sequences,
    records,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    RECORDS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    runs = records - sequences
    per_run, unit = share_of_a_run(bounds_ptr, sequences, runs, KEY_BITS, VALUE_BITS, SEQUENCES)
    place = tl.program_id(0) * RECORDS + tl.arange(0, RECORDS)
    is_run = place < runs
    begin = place * per_run
    sequence = tl.zeros((RECORDS,), tl.int32)
    base = tl.zeros((RECORDS,), tl.int32)
    before_all = 0
    for start in range(0, sequences, SEQUENCES):
        each = start + tl.arange(0, SEQUENCES)
        is_sequence = each < sequences
        costs = costs_of(bounds_ptr, each, is_sequence, KEY_BITS, VALUE_BITS)
        costs = tl.cdiv(costs, unit) * unit
        ends = before_all + tl.cumsum(costs, 0)
        is_before = tl.where(
            is_run[:, None],
            ends[None, :] <= begin[:, None],
            each[None, :] < (place - runs)[:, None],
        )
        is_before = is_before & is_sequence[None, :]
        sequence += tl.sum(is_before.to(tl.int32), 1)
        base += tl.sum(tl.where(is_before, costs[None, :], 0), 1)
        before_all += tl.sum(costs)

    record = plan_ptr + place * RECORD_SIZE
    mask = place < records
    has_sequence = mask & (sequence < sequences)
    tokens, cold, warm = steps_of(bounds_ptr, sequence, has_sequence, VALUE_BITS)
    cold_cost: tl.constexpr = KEY_BITS // 4 + VALUE_BITS // 4
    first_run = base // per_run
    offset = tl.where(is_run & has_sequence, begin - base, 0)
    end = tl.where(is_run, offset, first_run * per_run - base) + per_run
    store_steps(record + FIRST_TOKEN_SLAB, offset, end, 0, 2, tokens, mask)
    start = start_of_codes(tokens, cold, warm)
    store_steps(record + FIRST_COLD, offset, end, start, cold_cost, cold, mask)
    store_steps(record + FIRST_WARM, offset, end, start + cold_cost * cold, 4, warm, mask)
    cost = costs_of(bounds_ptr, sequence, has_sequence, KEY_BITS, VALUE_BITS)
    cost = tl.cdiv(cost, unit) * unit
    last_run = tl.cdiv(base + cost, per_run)
    is_own = ~is_run & (cost > 0)
    run = tl.where(is_own & (base % per_run > 0), first_run, NO_RUN)
    run = tl.where(is_run & has_sequence, place, run)
    tl.store(record + SEQUENCE, sequence, mask=mask)
    tl.store(record + RUN, run, mask=mask)
    tl.store(record + FIRST_RUN, tl.where(is_run, 0, first_run), mask=mask)
    tl.store(record + NUM_RUNS, tl.where(is_own, last_run - first_run, 0), mask=mask)
    bounds = bounds_ptr + 4 * sequence
    sink = tl.load(bounds, mask=has_sequence, other=0)
    hot = tl.load(bounds + 3, mask=has_sequence, other=0)
    hot -= tl.load(bounds + 2, mask=has_sequence, other=0)
    tl.store(record + SINK_SLABS, sink // 16, mask=mask)
    tl.store(record + KEY_SKIP, cold * (KEY_BITS // 4) + 2 * warm, mask=mask)
    tl.store(record + VALUE_SKIP, cold * (VALUE_BITS // 4) + 2 * warm, mask=mask)
    tl.store(record + NUM_TOKENS, sink + hot, mask=mask)
    tl.store(record + WARM_BLOCKS, warm, mask=mask)
    own = tl.where(base % per_run > 0, tl.minimum(cost, per_run - base % per_run), 0)
    before = waiting_before(
        bounds_ptr, place - runs, own, sequences, per_run, unit, KEY_BITS, VALUE_BITS, SEQUENCES
    )
    turn_ptr = plan_ptr + tl.where(is_run, place, runs + before) * RECORD_SIZE + TURN
    tl.store(turn_ptr, place, mask=mask)
