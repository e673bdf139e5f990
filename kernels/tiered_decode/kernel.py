"""One warp a program: it reads what one record of the plan says of the slabs of one sequence, for
the queries of one KV head; a second kernel merges what was found of a sequence.

Scores are kept times log2(e), for exp2.
"""

import triton
import triton.language as tl

from kernels.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from kernels.kernel import SERVED, kernel, variants
from kernels.tiered_decode import reference
from kernels.tiered_decode.reference import CONTRACT, MERGE_CONTRACT
from kernels.tiered_decode.tiers import attend_quantised, attend_tokens, begin_cold
from kernels.tiered_decode.tiles import (
    LEAST,
    WEIGHT,
    load_query,
    nothing_attended,
    place_of_row,
    unit_query,
)
from kernels.tiered_plan import kernel as fields

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
WARM_STAGES = tl.constexpr(reference.STAGES[8, 8])


@triton.jit
def store_attended(
    partial_ptr,
    partial_lse_ptr,
    state,
    rows,
    first_row,
    heads,
    FORM: tl.constexpr,
    QUERY_LEN: tl.constexpr,
):
    """What a run found of one sequence, for ROWS of the `rows` queries of one KV head."""
    SIZE: tl.constexpr = FORM[0]
    ROWS: tl.constexpr = FORM[1]
    PARTS: tl.constexpr = FORM[2]
    WIDTH: tl.constexpr = SIZE // 2 // PARTS
    greatest, total, attended, zeros = state
    total = tl.sum(total, 1)
    zeros, _ = zeros.reshape(2, 8, ROWS).permute(1, 2, 0).split()
    zeros = tl.broadcast_to(zeros[None, :, :], (WIDTH // 8, 8, ROWS)).reshape(WIDTH, ROWS)
    # A run may begin in a sequence after the last step that it could take there.
    inverse = (1.0 / tl.where(total > 0, total, 1.0))[None, :]
    row, channel = first_row + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_row = tl.broadcast_to((row < rows)[None, :], (WIDTH, ROWS))
    place = place_of_row(row, 1, heads, QUERY_LEN)
    partial = partial_ptr + place[None, :] * SIZE + channel[:, None]
    for nth in tl.static_range(2 * PARTS):
        start = nth % 2 * (SIZE // 2) + nth // 2 * WIDTH
        tl.store(partial + start, (attended[nth] + zeros) * inverse, mask=is_row)
    lse = greatest + tl.log2(total) - WEIGHT
    tl.store(partial_lse_ptr + place, lse, mask=row < rows)


@kernel(contract=CONTRACT, variants=variants({}, [reference.SERVED_META], aligned=[True]))
def tiered_decode_kernel(
    query_ptr,
    key_slabs_ptr,
    value_slabs_ptr,
    key_meta_ptr,
    value_meta_ptr,
    key_tables_ptr,
    value_tables_ptr,
    plan_ptr,
    partial_ptr,
    partial_lse_ptr,
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
    scale,
    query_stride,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_GRAIN: tl.constexpr,
    VALUE_GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Programs of the KV heads of one record follow each other: they read the same slabs.
    head = tl.program_id(0) // PROGRAMS
    first_row = tl.program_id(0) % PROGRAMS * ROWS
    PARTS: tl.constexpr = (SIZE + 127) // 128
    tl.static_assert((PARTS == 1) | (ROWS == 8))
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
    if QUERY_LEN > 1:
        hot = tl.load(record_ptr + fields.NUM_TOKENS)
        hot -= 16 * tl.load(record_ptr + fields.SINK_SLABS)
        is_plain = tl.load(record_ptr + fields.KEY_SKIP) == 0
        tl.device_assert(is_plain | (hot >= QUERY_LEN - 1), "tokens to hide in a quantised tier")
    group = heads // kv_heads
    query_ptr += row * query_sequence_stride + head * group * query_head_stride
    queries = (query_ptr, query_head_stride, query_stride)

    rows = group * QUERY_LEN
    FORM: tl.constexpr = (SIZE, ROWS, PARTS)
    state = nothing_attended(SIZE, ROWS, PARTS)
    if tl.load(record_ptr + fields.FIRST_TOKEN_SLAB) < tl.load(record_ptr + fields.LAST_TOKEN_SLAB):
        query = load_query(queries, rows, first_row, SIZE // PARTS, PARTS, ROWS, QUERY_LEN)
        factor = tl.full((ROWS,), 1.0, tl.float32) * (scale * LOG2_E)
        state = attend_tokens(
            query,
            factor,
            state,
            arenas,
            tables,
            record_ptr,
            first_row,
            head,
            kv_heads,
            FORM,
            QUERY_LEN,
            STAGES,
        )
    WIDTH: tl.constexpr = SIZE // 2 // PARTS
    query = load_query(queries, rows, first_row, WIDTH, 2 * PARTS, ROWS, QUERY_LEN)
    query, unit = unit_query(query, WIDTH, ROWS, PARTS)
    factor = unit * (scale * LOG2_E)
    WARM: tl.constexpr = (8, 8, KEY_GRAIN, VALUE_GRAIN)
    tables = (key_table + cold_start, value_table + cold_start)
    state = attend_quantised(
        query, factor, state, arenas, tables, cold, head, kv_heads, COLD, FORM, STAGES
    )
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
    at = (run + row) * QUERY_LEN * heads + head * group
    partial_ptr += at * SIZE
    partial_lse_ptr += at
    store_attended(partial_ptr, partial_lse_ptr, state, rows, first_row, heads, FORM, QUERY_LEN)


@kernel(
    contract=MERGE_CONTRACT,
    variants=variants({"out": SERVED}, reference.SERVED_MERGE_METAS, aligned=[True]),
)
def tiered_decode_merge_kernel(
    partial_ptr,
    partial_lse_ptr,
    plan_ptr,
    out_ptr,
    lse_ptr,
    records,
    sequences,
    queries,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence, query = row // queries, row % queries
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    record = plan_ptr + (records - sequences + sequence) * fields.RECORD_SIZE
    first_place = tl.load(record + fields.FIRST_RUN) + sequence
    num_runs = tl.load(record + fields.NUM_RUNS)
    wait_for_earlier_kernels()
    let_next_kernel_start()

    greatest = tl.full((1,), LEAST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    merged = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_runs, SPLITS):
        split = start + tl.arange(0, SPLITS)
        place = (first_place + split) * queries + query
        lse = tl.load(partial_lse_ptr + place, mask=split < num_runs, other=float("-inf"))
        mask = tl.broadcast_to((split < num_runs)[:, None], (SPLITS, COLUMNS))
        partials = partial_ptr + place[:, None] * SIZE + columns[None, :]
        partial = tl.load(partials, mask=mask, other=0.0)
        new_greatest = tl.maximum(greatest, tl.max(lse, axis=0, keep_dims=True))
        weights = tl.exp2(lse - new_greatest)
        shrink = tl.exp2(greatest - new_greatest)
        total = total * shrink + tl.sum(weights, axis=0, keep_dims=True)
        merged = merged * shrink + tl.sum(weights[:, None] * partial, axis=0)
        greatest = new_greatest

    out = tl.where((columns >= 0) & (total != 0), merged / total, 0.0)
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty))
    is_first = (tl.program_id(1) + tl.arange(0, 1)) == 0
    lse = (greatest + tl.log2(total)) * LN_2
    tl.store(lse_ptr + row + tl.arange(0, 1), lse, mask=is_first)
