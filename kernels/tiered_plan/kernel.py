"""A program makes some records, and looks at the bounds of all sequences for them."""

import triton
import triton.language as tl

from kernels.kernel import kernel, variants
from kernels.tiered_plan import reference
from kernels.tiered_plan.reference import CONTRACT

SEQUENCE = tl.constexpr(reference.SEQUENCE)
NUM_SEQUENCES = tl.constexpr(reference.NUM_SEQUENCES)
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
        [reference.meta_of(formats) for formats in reference.FORMATS],
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
    COLD: tl.constexpr = 4 if VALUE_BITS == 8 else (3 if KEY_BITS == 8 else 2)
    runs = records - sequences
    whole = tl.zeros((SEQUENCES,), tl.int32)
    for start in range(0, sequences, SEQUENCES):
        each = start + tl.arange(0, SEQUENCES)
        tokens, cold, warm = steps_of(bounds_ptr, each, each < sequences, VALUE_BITS)
        whole += 2 * tokens + COLD * cold + 4 * warm
    per_run = tl.maximum(tl.cdiv(tl.sum(whole), runs), 1)

    place = tl.program_id(0) * RECORDS + tl.arange(0, RECORDS)
    is_run = place < runs
    begin = place * per_run
    sequence = tl.zeros((RECORDS,), tl.int32)
    begun = tl.zeros((RECORDS,), tl.int32)
    base = tl.zeros((RECORDS,), tl.int32)
    before_all = 0
    for start in range(0, sequences, SEQUENCES):
        each = start + tl.arange(0, SEQUENCES)
        is_sequence = each < sequences
        tokens, cold, warm = steps_of(bounds_ptr, each, is_sequence, VALUE_BITS)
        costs = 2 * tokens + COLD * cold + 4 * warm
        ends = before_all + tl.cumsum(costs, 0)
        is_before = tl.where(
            is_run[:, None],
            ends[None, :] <= begin[:, None],
            each[None, :] < (place - runs)[:, None],
        )
        is_before = is_before & is_sequence[None, :]
        has_begun = ((ends - costs)[None, :] < (begin + per_run)[:, None]) & is_sequence[None, :]
        sequence += tl.sum(is_before.to(tl.int32), 1)
        begun += tl.sum(has_begun.to(tl.int32), 1)
        base += tl.sum(tl.where(is_before, costs[None, :], 0), 1)
        before_all += tl.sum(costs)

    record = plan_ptr + place * RECORD_SIZE
    mask = place < records
    has_sequence = mask & (sequence < sequences)
    tokens, cold, warm = steps_of(bounds_ptr, sequence, has_sequence, VALUE_BITS)
    first_run = base // per_run
    offset = tl.where(is_run, begin - base, 0)
    end = tl.where(is_run, offset, (first_run * per_run) - base) + per_run
    store_steps(record + FIRST_TOKEN_SLAB, offset, end, 0, 2, tokens, mask)
    store_steps(record + FIRST_COLD, offset, end, 2 * tokens, COLD, cold, mask)
    store_steps(record + FIRST_WARM, offset, end, 2 * tokens + COLD * cold, 4, warm, mask)
    tl.store(record + SEQUENCE, sequence, mask=mask)
    tl.store(record + NUM_SEQUENCES, tl.where(is_run, begun - sequence, 0), mask=mask)
    bounds = bounds_ptr + 4 * sequence
    sink = tl.load(bounds, mask=has_sequence, other=0)
    hot = tl.load(bounds + 3, mask=has_sequence, other=0)
    hot -= tl.load(bounds + 2, mask=has_sequence, other=0)
    tl.store(record + SINK_SLABS, sink // 16, mask=mask)
    tl.store(record + KEY_SKIP, cold * (KEY_BITS // 4) + 2 * warm, mask=mask)
    tl.store(record + VALUE_SKIP, cold * (VALUE_BITS // 4) + 2 * warm, mask=mask)
    tl.store(record + NUM_TOKENS, sink + hot, mask=mask)
    tl.store(record + WARM_BLOCKS, warm, mask=mask)
    cost = 2 * tokens + COLD * cold + 4 * warm
    num_runs = tl.where(cost > 0, tl.cdiv(base + cost, per_run) - first_run, 0)
    tl.store(record + FIRST_RUN, tl.where(is_run, 0, first_run), mask=mask)
    tl.store(record + NUM_RUNS, tl.where(is_run, 0, num_runs), mask=mask)
    tl.store(record + 15, tl.zeros((RECORDS,), tl.int32), mask=mask)
