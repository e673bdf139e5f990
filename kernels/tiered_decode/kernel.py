"""One warp a program: it reads what one record of the plan says of the slabs of one sequence, for
the query heads of one KV head; a second kernel merges what was found of a sequence.

Scores are kept times log2(e), for exp2.
"""

import torch
import triton
import triton.language as tl

from kernels.kernel import kernel, variants
from kernels.tiered_decode import reference
from kernels.tiered_decode.reference import CONTRACT, MERGE_CONTRACT
from kernels.tiered_decode.tiles import (
    WEIGHT,
    accumulated,
    bias_and_zeros,
    by_tokens,
    first_rows,
    halves_of_query,
    keys_of_bytes,
    keys_of_nibbles,
    natural,
    nothing_attended,
    pair_of,
    plain_query,
    prefetch_slabs,
    slab_at,
    unit_query,
    values_of_bytes,
    values_of_nibbles,
    weighed,
)
from kernels.tiered_plan import kernel as fields

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
WARM_STAGES = tl.constexpr(reference.STAGES[8, 8])


@triton.jit
def attend_quantised(
    query_low,
    query_high,
    factor,
    state,
    arenas,
    key_table_ptr,
    value_table_ptr,
    first,
    last,
    head,
    kv_heads,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_GRAIN: tl.constexpr,
    VALUE_GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Blocks `first` to `last` of a tier of one format."""
    key_slabs_ptr, value_slabs_ptr, key_meta_ptr, value_meta_ptr, num_keys, num_values = arenas
    greatest, total, attended_low, attended_high, attended_zeros = state
    PART: tl.constexpr = 32 * SIZE
    HALF: tl.constexpr = SIZE // 2
    in_part = tl.arange(0, PART)
    in_half_part = tl.arange(0, PART // 2)
    in_half = tl.arange(0, HALF)
    slab_bytes = kv_heads * PART
    for block in tl.range(first, last, num_stages=STAGES):
        key_place = key_table_ptr + block * (KEY_BITS // 4)
        value_place = value_table_ptr + block * (VALUE_BITS // 4)
        value_slab = slab_at(value_place, num_values)
        if VALUE_BITS == 8:
            value_slabs = pair_of(value_slab, value_place, num_values, VALUE_GRAIN)
        key_slab = slab_at(key_place, num_keys)
        if KEY_BITS == 4:
            packed_keys = tl.load(key_slabs_ptr + key_slab * slab_bytes + head * PART + in_part)
        else:
            key_slabs = pair_of(key_slab, key_place, num_keys, KEY_GRAIN)
            starts = key_slabs * slab_bytes + head * PART
            halves = key_slabs_ptr + starts[:, None] + in_half_part[None, :]
            packed_low = tl.load(halves)
            packed_high = tl.load(halves + PART // 2)
        key_slot = key_slab // KEY_GRAIN
        key_meta = key_meta_ptr + (key_slot * kv_heads + head) * (2 * SIZE) + in_half
        scales_low = accumulated(tl.load(key_meta), 1, HALF // 32)
        scales_high = accumulated(tl.load(key_meta + HALF), 1, HALF // 32)
        zeros_low = accumulated(tl.load(key_meta + SIZE), 1, HALF // 32)
        zeros_high = accumulated(tl.load(key_meta + (SIZE + HALF)), 1, HALF // 32)
        if VALUE_BITS == 4:
            starts = value_slab * slab_bytes + head * PART
            packed_values = tl.load(value_slabs_ptr + starts + in_part)
        else:
            starts = value_slabs * slab_bytes + head * PART
            halves = value_slabs_ptr + starts[:, None] + in_half_part[None, :]
            packed_values_low = tl.load(halves)
            packed_values_high = tl.load(halves + PART // 2)
        if VALUE_BITS // VALUE_GRAIN == 4:  # of all 64 tokens
            value_slot = value_slab // VALUE_GRAIN
            value_meta = value_meta_ptr + (value_slot * kv_heads + head) * 128 + tl.arange(0, 64)
            value_scales = accumulated(tl.load(value_meta), 1, 2)
            value_zeros = accumulated(tl.load(value_meta + 64), 1, 2)
        else:
            places = ((value_slabs * kv_heads + head) * 128)[:, None] + tl.arange(0, 32)[None, :]
            value_scales = accumulated(tl.load(value_meta_ptr + places), 2, 1)
            value_zeros = accumulated(tl.load(value_meta_ptr + 64 + places), 2, 1)

        scaled_low = query_low * scales_low[None, :]
        scaled_high = query_high * scales_high[None, :]
        LOW_BIAS: tl.constexpr = -1032.0 if KEY_BITS == 4 else -1152.0
        scores = bias_and_zeros(scaled_low, zeros_low, LOW_BIAS, HALF)
        scores += bias_and_zeros(scaled_high, zeros_high, -1152.0, HALF)
        scores = tl.broadcast_to(scores[:, None, :], (16, 8, 8)).reshape(16, 64)
        if KEY_BITS == 4:
            keys_low, keys_high = keys_of_nibbles(packed_keys, HALF)
        else:
            keys_low = keys_of_bytes(packed_low, HALF)
            keys_high = keys_of_bytes(packed_high, HALF)
        scores = tl.dot(natural(scaled_low, 16, HALF), keys_low, scores)
        scores = tl.dot(natural(scaled_high, 16, HALF), keys_high, scores)
        scores = first_rows(scores, ROWS, 64)

        weights, shrink, greatest, total = weighed(scores, factor, greatest, total, ROWS, 64)
        weights = (weights * value_scales.to(tl.float32)[None, :]).to(tl.float16)
        if VALUE_BITS == 4:
            values_low, values_high = values_of_nibbles(packed_values, HALF)
        else:
            values_low = values_of_bytes(packed_values_low, HALF)
            values_high = values_of_bytes(packed_values_high, HALF)
        by_token = by_tokens(weights, ROWS)
        attended_low = tl.dot(values_low, by_token, attended_low * shrink[None, :])
        attended_high = tl.dot(values_high, by_token, attended_high * shrink[None, :])
        value_zeros = tl.broadcast_to(value_zeros[None, :], (16, 64))
        weights = weights.permute(1, 0).reshape(64, ROWS)
        attended_zeros = tl.dot(value_zeros, weights, attended_zeros * shrink[None, :])
    return greatest, total, attended_low, attended_high, attended_zeros


@triton.jit
def attend_tokens(
    query,
    factor,
    state,
    arenas,
    tables,
    record_ptr,
    head,
    kv_heads,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Slabs of bfloat16: of the sink, and of the hot tier, whose last one is filled in part. They
    come first, before there are zeros."""
    greatest, total, attended_low, attended_high, attended_zeros = state
    HALF: tl.constexpr = SIZE // 2
    sink_slabs = tl.load(record_ptr + fields.SINK_SLABS)
    key_skip = tl.load(record_ptr + fields.KEY_SKIP)
    value_skip = tl.load(record_ptr + fields.VALUE_SKIP)
    num_tokens = tl.load(record_ptr + fields.NUM_TOKENS)
    key_slabs_ptr, value_slabs_ptr, _, _, num_keys, num_values = arenas
    key_table_ptr, value_table_ptr = tables
    keys_ptr = key_slabs_ptr.to(tl.pointer_type(tl.bfloat16))
    values_ptr = value_slabs_ptr.to(tl.pointer_type(tl.bfloat16))
    token = tl.arange(0, 16)
    row_stride = kv_heads * SIZE
    in_slab = token[:, None] * row_stride + head * SIZE
    first = tl.load(record_ptr + fields.FIRST_TOKEN_SLAB)
    last = tl.load(record_ptr + fields.LAST_TOKEN_SLAB)
    for slab in tl.range(first, last, num_stages=STAGES):
        is_hot = slab >= sink_slabs
        key_slab = slab_at(key_table_ptr + slab + tl.where(is_hot, key_skip, 0), num_keys)
        value_slab = slab_at(value_table_ptr + slab + tl.where(is_hot, value_skip, 0), num_values)
        key_places = in_slab + tl.arange(0, SIZE)[None, :]
        keys = tl.load(keys_ptr + key_slab * (16 * row_stride) + key_places)
        # Not loaded where there is none: what was in a slab before may be NaN, and zero times it.
        is_token = slab * 16 + token < num_tokens
        value_places = in_slab + tl.arange(0, HALF)[None, :]
        values = values_ptr + value_slab * (16 * row_stride) + value_places
        is_loaded = tl.broadcast_to(is_token[:, None], (16, HALF))
        values_low = tl.load(values, mask=is_loaded, other=0.0)
        values_high = tl.load(values + HALF, mask=is_loaded, other=0.0)

        scores = first_rows(tl.dot(query, tl.trans(keys)), ROWS, 16)
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        weights, shrink, greatest, total = weighed(scores, factor, greatest, total, ROWS, 16)
        weights = weights.permute(1, 0).reshape(16, ROWS)
        coarse = weights.to(tl.bfloat16)
        fine = (weights - coarse.to(tl.float32)).to(tl.bfloat16)
        values_low, values_high = tl.trans(values_low), tl.trans(values_high)
        attended_low = tl.dot(values_low, coarse, attended_low * shrink[None, :])
        attended_low = tl.dot(values_low, fine, attended_low)
        attended_high = tl.dot(values_high, coarse, attended_high * shrink[None, :])
        attended_high = tl.dot(values_high, fine, attended_high)
    return greatest, total, attended_low, attended_high, attended_zeros


@triton.jit
def store_attended(
    partial_ptr, partial_lse_ptr, state, group, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    """What a run found of one sequence, for `group` heads."""
    HALF: tl.constexpr = SIZE // 2
    greatest, total, attended_low, attended_high, zeros = state
    total = tl.sum(total, 1)
    zeros, _ = zeros.reshape(2, 8, ROWS).permute(1, 2, 0).split()
    zeros = tl.broadcast_to(zeros[None, :, :], (HALF // 8, 8, ROWS)).reshape(HALF, ROWS)
    # A run may begin in a sequence after the last step that it could take there.
    inverse = (1.0 / tl.where(total > 0, total, 1.0))[None, :]
    in_group, channel = tl.arange(0, ROWS), tl.arange(0, HALF)
    is_head = tl.broadcast_to((in_group < group)[None, :], (HALF, ROWS))
    partial = partial_ptr + in_group[None, :] * SIZE + channel[:, None]
    tl.store(partial, (attended_low + zeros) * inverse, mask=is_head)
    tl.store(partial + HALF, (attended_high + zeros) * inverse, mask=is_head)
    lse = greatest + tl.log2(total) - WEIGHT
    tl.store(partial_lse_ptr + in_group, lse, mask=in_group < group)


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
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_GRAIN: tl.constexpr,
    VALUE_GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Programs of the KV heads of one record follow each other: they read the same slabs.
    head = tl.program_id(0)
    turn = tl.program_id(1)
    if turn >= records - sequences:  # those of runs come in order
        turn = tl.load(plan_ptr + turn * fields.RECORD_SIZE + fields.TURN)
    record_ptr = plan_ptr + turn * fields.RECORD_SIZE
    run = tl.load(record_ptr + fields.RUN)
    if run == fields.NO_RUN:
        return
    num_keys, num_values = key_slots * KEY_GRAIN, value_slots * VALUE_GRAIN
    arenas = (key_slabs_ptr, value_slabs_ptr, key_meta_ptr, value_meta_ptr, num_keys, num_values)
    group = heads // kv_heads
    row = tl.load(record_ptr + fields.SEQUENCE).to(tl.int64)
    queries = query_ptr + row * query_sequence_stride + head * group * query_head_stride
    key_table = key_tables_ptr + row * max_key_slabs
    value_table = value_tables_ptr + row * max_value_slabs

    state = nothing_attended(SIZE // 2, ROWS)
    if tl.load(record_ptr + fields.FIRST_TOKEN_SLAB) < tl.load(record_ptr + fields.LAST_TOKEN_SLAB):
        query = plain_query(queries, query_head_stride, group, SIZE, ROWS)
        factor = tl.full((ROWS,), 1.0, tl.float32) * (scale * LOG2_E)
        tables = (key_table, value_table)
        state = attend_tokens(
            query, factor, state, arenas, tables, record_ptr, head, kv_heads, SIZE, ROWS, STAGES
        )
    cold_start = tl.load(record_ptr + fields.SINK_SLABS)
    first_cold = tl.load(record_ptr + fields.FIRST_COLD)
    last_cold = tl.load(record_ptr + fields.LAST_COLD)
    # What the first block waits for is under way while the query is prepared.
    has_cold = first_cold < last_cold
    at_key = key_table + cold_start + first_cold * (KEY_BITS // 4)
    at_value = value_table + cold_start + first_cold * (VALUE_BITS // 4)
    first_keys = tl.load(at_key, mask=has_cold, other=0)
    first_values = tl.load(at_value, mask=has_cold, other=0)
    low, high = halves_of_query(queries, query_head_stride, group, SIZE, ROWS)
    prefetch_slabs(arenas, first_keys, first_values, head, kv_heads, KEY_GRAIN, VALUE_GRAIN, SIZE)
    low, high, unit = unit_query(low, high, SIZE // 2, ROWS)
    factor = unit * (scale * LOG2_E)
    state = attend_quantised(
        low,
        high,
        factor,
        state,
        arenas,
        key_table + cold_start,
        value_table + cold_start,
        first_cold,
        last_cold,
        head,
        kv_heads,
        KEY_BITS,
        VALUE_BITS,
        KEY_GRAIN,
        VALUE_GRAIN,
        SIZE,
        ROWS,
        STAGES,
    )
    if VALUE_BITS == 4:  # else the warm tier is of the cold one
        first_warm = tl.load(record_ptr + fields.FIRST_WARM)
        last_warm = tl.load(record_ptr + fields.LAST_WARM)
        if first_warm < last_warm:
            warm_start = cold_start - 2 * tl.load(record_ptr + fields.WARM_BLOCKS)
            state = attend_quantised(
                low,
                high,
                factor,
                state,
                arenas,
                key_table + warm_start + tl.load(record_ptr + fields.KEY_SKIP),
                value_table + warm_start + tl.load(record_ptr + fields.VALUE_SKIP),
                first_warm,
                last_warm,
                head,
                kv_heads,
                8,
                8,
                KEY_GRAIN,
                VALUE_GRAIN,
                SIZE,
                ROWS,
                WARM_STAGES,
            )
    at = (run + row) * heads + head * group
    store_attended(partial_ptr + at * SIZE, partial_lse_ptr + at, state, group, SIZE, ROWS)


@kernel(
    contract=MERGE_CONTRACT,
    variants=variants({"out": [torch.bfloat16]}, reference.SERVED_MERGE_METAS, aligned=[True]),
)
def tiered_decode_merge_kernel(
    partial_ptr,
    partial_lse_ptr,
    plan_ptr,
    out_ptr,
    lse_ptr,
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
    first_place = tl.load(record + fields.FIRST_RUN) + sequence
    num_runs = tl.load(record + fields.NUM_RUNS)

    greatest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    merged = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, num_runs, SPLITS):
        split = start + tl.arange(0, SPLITS)
        place = (first_place + split) * heads + head
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

    out = tl.where((columns >= 0) & (num_runs > 0), merged / total, 0.0)
    tl.store(out_ptr + row * SIZE + columns, out.to(out_ptr.dtype.element_ty))
    is_first = (tl.program_id(1) + tl.arange(0, 1)) == 0
    lse = (greatest + tl.log2(total)) * LN_2
    tl.store(lse_ptr + row + tl.arange(0, 1), lse, mask=is_first)
