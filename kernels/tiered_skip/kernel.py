"""As kernels/tiered_decode: one warp a program, what one record of the plan says. Programs of a
second kernel look, each for itself, whether a head skipped too much, and attend to the heaviest of
that; a third kernel merges both.

Scores are kept times log2(e), for exp2.
"""

import triton
import triton.language as tl

from kernels.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from kernels.kernel import SERVED, kernel, variants
from kernels.tiered_decode import reference as decode
from kernels.tiered_decode.kernel import store_attended
from kernels.tiered_decode.tiers import attend_quantised, attend_tokens, begin_cold
from kernels.tiered_decode.tiles import (
    LEAST,
    WEIGHT,
    load_query,
    nothing_attended,
    unit_query,
)
from kernels.tiered_plan import kernel as fields
from kernels.tiered_skip import reference
from kernels.tiered_skip.reference import AGAIN_CONTRACT, CONTRACT, MERGE_CONTRACT
from kernels.tiered_skip.tiers import (
    LOG2_E,
    LOST,
    attend_heavy,
    attend_unskipped,
    limit_of_part,
    merged_sums,
    raised_by,
    with_sums,
)

LN_2 = tl.constexpr(0.6931471805599453)
WARM_STAGES = tl.constexpr(decode.STAGES[8, 8])


@triton.jit
def both_sums(sums_ptr, size):
    """Of what was attended to, and of what was skipped."""
    return sums_ptr, sums_ptr + size


@kernel(contract=CONTRACT, variants=variants({}, [reference.SERVED_META], aligned=[True]))
def tiered_skip_kernel(
    query_ptr,
    key_slabs_ptr,
    value_slabs_ptr,
    key_meta_ptr,
    value_meta_ptr,
    key_tables_ptr,
    value_tables_ptr,
    plan_ptr,
    skips_ptr,
    reach_ptr,
    masses_ptr,
    partial_ptr,
    partial_sums_ptr,
    query_sequence_stride,
    query_head_stride,
    sequences,
    heads,
    key_slots,
    value_slots,
    kv_heads,
    max_key_slabs,
    max_value_slabs,
    records,
    blocks,
    scale,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_GRAIN: tl.constexpr,
    VALUE_GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    turn = tl.program_id(1)
    if turn >= records - sequences:  # those of runs come in order
        turn = tl.load(plan_ptr + turn * fields.RECORD_SIZE + fields.TURN)
    record_ptr = plan_ptr + turn * fields.RECORD_SIZE
    run = tl.load(record_ptr + fields.RUN)
    num_keys, num_values = key_slots * KEY_GRAIN, value_slots * VALUE_GRAIN
    arenas = (key_slabs_ptr, value_slabs_ptr, key_meta_ptr, value_meta_ptr, num_keys, num_values)
    row = tl.load(record_ptr + fields.SEQUENCE).to(tl.int64)
    key_table = key_tables_ptr + row * max_key_slabs
    value_table = value_tables_ptr + row * max_value_slabs
    COLD: tl.constexpr = (KEY_BITS, VALUE_BITS, KEY_GRAIN, VALUE_GRAIN)
    tables = (key_table, value_table)
    cold_start, cold = begin_cold(record_ptr, arenas, tables, head, kv_heads, COLD, SIZE)
    wait_for_earlier_kernels()
    let_next_kernel_start()
    if run == fields.NO_RUN:
        return
    group = heads // kv_heads
    query_ptr += row * query_sequence_stride + head * group * query_head_stride
    queries = (query_ptr, query_head_stride, 0)

    FORM: tl.constexpr = (SIZE, ROWS, 1)
    state = nothing_attended(SIZE, ROWS, 1)
    if tl.load(record_ptr + fields.FIRST_TOKEN_SLAB) < tl.load(record_ptr + fields.LAST_TOKEN_SLAB):
        query = load_query(queries, group, 0, SIZE, 1, ROWS, 1)
        factor = tl.full((ROWS,), 1.0, tl.float32) * (scale * LOG2_E)
        state = attend_tokens(
            query, factor, state, arenas, tables, record_ptr, 0, head, kv_heads, FORM, 1, STAGES
        )
    reach = tl.load(reach_ptr + row * kv_heads + head)
    query = load_query(queries, group, 0, SIZE // 2, 2, ROWS, 1)
    raised = raised_by(query, scale * LOG2_E, reach, ROWS)
    query, unit = unit_query(query, SIZE // 2, ROWS, 1)
    factor = unit * (scale * LOG2_E)
    WARM: tl.constexpr = (8, 8, KEY_GRAIN, VALUE_GRAIN)
    tables = (key_table + cold_start, value_table + cold_start)
    own = (row * kv_heads + head) * blocks
    tl.device_assert(cold[1] <= blocks, "blocks that skips have no place for")
    raised -= WEIGHT
    skipping = (skips_ptr + own, masses_ptr + own * group, group, raised)
    state, skipped, any_skipped = attend_unskipped(
        query,
        factor,
        state,
        arenas,
        tables,
        cold,
        skipping,
        head,
        kv_heads,
        COLD,
        FORM,
        STAGES,
    )
    # Over the greatest weight of the cold tier and of the tokens: a warm one's may be greater.
    skipped = state[0] + tl.log2(tl.sum(skipped, 1) + LOST) + raised
    skipped = tl.where(any_skipped > 0, skipped, float("-inf"))
    if VALUE_BITS == 4:  # else the warm tier is of the cold one
        warm = (tl.load(record_ptr + fields.FIRST_WARM), tl.load(record_ptr + fields.LAST_WARM))
        if warm[0] < warm[1]:
            warm_start = cold_start - 2 * tl.load(record_ptr + fields.WARM_BLOCKS)
            warm_keys = key_table + warm_start + tl.load(record_ptr + fields.KEY_SKIP)
            warm_values = value_table + warm_start + tl.load(record_ptr + fields.VALUE_SKIP)
            tables = (warm_keys, warm_values)
            state = attend_quantised(
                query, factor, state, arenas, tables, warm, head, kv_heads, WARM, FORM, WARM_STAGES
            )
    # What was read beside far heavier blocks that were not is among what is LOST, and no divisor.
    greatest, total, attended, zeros = state
    is_lost = tl.sum(total, 1) < LOST / 2
    state = (greatest, tl.where(is_lost[:, None], 0.0, total), attended, zeros)
    at = (run + row) * heads + head * group
    partial_ptr += at * SIZE
    partial_lse_ptr, partial_skipped_ptr = both_sums(partial_sums_ptr + at, records * heads)
    store_attended(partial_ptr, partial_lse_ptr, state, group, 0, heads, FORM, 1)
    rows = tl.arange(0, ROWS)
    tl.store(partial_skipped_ptr + rows, skipped, mask=rows < group)


@kernel(
    contract=AGAIN_CONTRACT,
    variants=variants({}, [reference.again_meta_of(reference.SERVED_META)], aligned=[True]),
)
def tiered_skip_again_kernel(
    query_ptr,
    key_slabs_ptr,
    value_slabs_ptr,
    key_meta_ptr,
    value_meta_ptr,
    key_tables_ptr,
    value_tables_ptr,
    plan_ptr,
    skips_ptr,
    masses_ptr,
    partial_sums_ptr,
    left_out_ptr,
    again_ptr,
    again_sums_ptr,
    query_sequence_stride,
    query_head_stride,
    sequences,
    heads,
    key_slots,
    value_slots,
    kv_heads,
    max_key_slabs,
    max_value_slabs,
    records,
    blocks,
    scale,
    most,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_GRAIN: tl.constexpr,
    VALUE_GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    SUMS: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(0)
    record_ptr = plan_ptr + tl.program_id(1) * fields.RECORD_SIZE
    run = tl.load(record_ptr + fields.RUN)
    row = tl.load(record_ptr + fields.SEQUENCE).to(tl.int64)
    group = heads // kv_heads
    sequence_ptr = plan_ptr + (records - sequences + row) * fields.RECORD_SIZE
    has_run = run != fields.NO_RUN
    num_runs = tl.load(sequence_ptr + fields.NUM_RUNS, mask=has_run, other=0)
    first = tl.load(sequence_ptr + fields.FIRST_RUN, mask=has_run, other=0)
    wait_for_earlier_kernels()
    let_next_kernel_start()
    if not has_run:
        return
    first = (first + row) * heads + head * group
    partial_lse_ptr, partial_skipped_ptr = both_sums(partial_sums_ptr, records * heads)
    again_lse_ptr, again_skipped_ptr = both_sums(again_sums_ptr, records * heads)
    at = (run + row) * heads + head * group
    rows = tl.arange(0, ROWS)
    unchanged = tl.load(partial_skipped_ptr + at + rows, mask=rows < group, other=0.0)
    skipped, lse = merged_sums(
        partial_skipped_ptr + first, partial_lse_ptr + first, num_runs, heads, group, ROWS, SUMS
    )
    is_too_much = (skipped > float("-inf")) & ((skipped - lse <= most) == 0)
    again_lse_ptr += at
    again_skipped_ptr += at + rows
    if tl.max(is_too_much.to(tl.int32), 0) == 0:
        tl.store(again_skipped_ptr, unchanged, mask=rows < group)
        nothing = tl.full((ROWS,), float("-inf"), tl.float32)
        tl.store(again_lse_ptr + rows, nothing, mask=rows < group)
        return
    places = (row * kv_heads + head) * blocks
    skips_ptr += places
    left_out_ptr += places
    masses_ptr += places * group
    num_cold = tl.load(record_ptr + fields.KEY_SKIP) - 2 * tl.load(record_ptr + fields.WARM_BLOCKS)
    num_cold = num_cold // (KEY_BITS // 4)
    num_keys, num_values = key_slots * KEY_GRAIN, value_slots * VALUE_GRAIN
    arenas = (key_slabs_ptr, value_slabs_ptr, key_meta_ptr, value_meta_ptr, num_keys, num_values)
    query_ptr += row * query_sequence_stride + head * group * query_head_stride
    query = load_query((query_ptr, query_head_stride, 0), group, 0, SIZE // 2, 2, ROWS, 1)
    query, unit = unit_query(query, SIZE // 2, ROWS, 1)
    factor = unit * (scale * LOG2_E)
    cold_start = tl.load(record_ptr + fields.SINK_SLABS)
    key_table = key_tables_ptr + row * max_key_slabs + cold_start
    tables = (key_table, value_tables_ptr + row * max_value_slabs + cold_start)
    COLD: tl.constexpr = (KEY_BITS, VALUE_BITS, KEY_GRAIN, VALUE_GRAIN)
    FORM: tl.constexpr = (SIZE, ROWS, 1)
    first = tl.load(record_ptr + fields.FIRST_COLD)
    last = tl.load(record_ptr + fields.LAST_COLD)
    skipping = (skips_ptr, masses_ptr, left_out_ptr)
    state = (nothing_attended(SIZE, ROWS, 1), tl.zeros((ROWS,), tl.float32))
    for start in range(first // PART * PART, tl.where(first < last, last, 0), PART):
        own = (tl.maximum(first, start), tl.minimum(last, start + PART))
        limit = limit_of_part(skips_ptr, masses_ptr, own[0], num_cold, group, lse, most, ROWS, PART)
        state = attend_heavy(
            query,
            factor,
            state,
            lse,
            limit,
            arenas,
            tables,
            own,
            skipping,
            group,
            head,
            kv_heads,
            COLD,
            FORM,
            STAGES,
            TILE,
        )
    attended, skipped = state
    skipped = tl.where(skipped > 0, lse + tl.log2(skipped), float("-inf"))
    tl.store(again_skipped_ptr, skipped, mask=rows < group)
    store_attended(again_ptr + at * SIZE, again_lse_ptr, attended, group, 0, heads, FORM, 1)


@triton.jit
def with_results(state, lse, partials, is_found):
    """(greatest, total, merged), with what splits found: partials [SPLITS, COLUMNS]."""
    greatest, total, merged = state
    mask = tl.broadcast_to(is_found[:, None], partials.shape)
    partial = tl.load(partials, mask=mask, other=0.0)
    new_greatest = tl.maximum(greatest, tl.max(lse, axis=0, keep_dims=True))
    weights = tl.exp2(lse - new_greatest)
    shrink = tl.exp2(greatest - new_greatest)
    total = total * shrink + tl.sum(weights, axis=0, keep_dims=True)
    merged = merged * shrink + tl.sum(weights[:, None] * partial, axis=0)
    return new_greatest, total, merged


@kernel(
    contract=MERGE_CONTRACT,
    variants=variants({"out": SERVED}, [reference.SERVED_MERGE_META], aligned=[True]),
)
def tiered_skip_merge_kernel(
    partial_ptr,
    partial_sums_ptr,
    again_ptr,
    again_sums_ptr,
    plan_ptr,
    out_ptr,
    lse_ptr,
    skipped_ptr,
    records,
    sequences,
    heads,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence, head = row // heads, row % heads
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    record = plan_ptr + (records - sequences + sequence) * fields.RECORD_SIZE
    first = (tl.load(record + fields.FIRST_RUN) + sequence) * heads + head
    num_runs = tl.load(record + fields.NUM_RUNS)
    wait_for_earlier_kernels()
    let_next_kernel_start()

    least, nothing = tl.full((1,), LEAST, tl.float32), tl.zeros((1,), tl.float32)
    state = least, nothing, tl.zeros((COLUMNS,), tl.float32)
    skipped = least, nothing
    again = tl.full((1,), float("-inf"), tl.float32)
    partial_ptr += first * SIZE + columns[None, :]
    again_ptr += first * SIZE + columns[None, :]
    partial_lse_ptr, _ = both_sums(partial_sums_ptr + first, records * heads)
    again_lse_ptr, again_skipped_ptr = both_sums(again_sums_ptr + first, records * heads)
    for start in range(0, num_runs, SPLITS):
        split = start + tl.arange(0, SPLITS)
        is_run, place = split < num_runs, split.to(tl.int64) * heads
        lse = tl.load(partial_lse_ptr + place, mask=is_run, other=float("-inf"))
        more = tl.load(again_lse_ptr + place, mask=is_run, other=float("-inf"))
        left = tl.load(again_skipped_ptr + place, mask=is_run, other=float("-inf"))
        state = with_results(state, lse, partial_ptr + place[:, None] * SIZE, is_run)
        skipped = with_sums(skipped, left[:, None])
        again = tl.maximum(again, tl.max(more, axis=0, keep_dims=True))
    if tl.max(again, 0) > float("-inf"):
        for start in range(0, num_runs, SPLITS):
            split = start + tl.arange(0, SPLITS)
            is_run, place = split < num_runs, split.to(tl.int64) * heads
            lse = tl.load(again_lse_ptr + place, mask=is_run, other=float("-inf"))
            is_found = lse > float("-inf")  # else nothing was stored
            state = with_results(state, lse, again_ptr + place[:, None] * SIZE, is_found)
    skipped = skipped[0] + tl.log2(skipped[1])
    greatest, total, merged = state
    out = tl.where((columns >= 0) & (total != 0), merged / total, 0.0)
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty))
    is_first = (tl.program_id(1) + tl.arange(0, 1)) == 0
    tl.store(lse_ptr + row + tl.arange(0, 1), (greatest + tl.log2(total)) * LN_2, mask=is_first)
    tl.store(skipped_ptr + row + tl.arange(0, 1), skipped * LN_2, mask=is_first)
