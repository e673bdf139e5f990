"""What a program does with its share of the cold tier where some of it is skipped, and how it finds
what was too heavy for that. FORM, FORMATS: as in kernels/tiered_decode/tiers.py, of one part."""

import triton
import triton.language as tl

from kernels.interpreted import IS_INTERPRETED
from kernels.tiered_decode.tiers import (
    added_scores,
    added_values,
    attend_quantised,
    load_codes,
    load_key_meta,
    slabs_of,
)
from kernels.tiered_decode.tiles import (
    LEAST,
    accumulated,
    first_rows,
    weighed,
)
from kernels.tiered_skip import reference, rounding

LOG2_E = tl.constexpr(1.4426950408889634)
SUM_ERROR = tl.constexpr(rounding.SUM_ERROR)
LOST = tl.constexpr(rounding.LOST)
MARGIN = tl.constexpr(reference.MARGIN)
NUM_HALVINGS = tl.constexpr(reference.NUM_HALVINGS)


@triton.jit
def raised_by(query, factor, reach, ROWS: tl.constexpr):
    """Twice what a sum of exponentials can be off by, as a logarithm to base 2, [ROWS]. query: its
    halves, [16, ...]."""
    low, high = query[0].to(tl.float32), query[1].to(tl.float32)
    length = tl.sqrt(tl.sum(low * low, 1) + tl.sum(high * high, 1))
    if ROWS == 8:
        length, _ = length.reshape(2, 8).permute(1, 0).split()
    return 2 * (length * factor * reach + SUM_ERROR * LOG2_E)


@triton.jit
def log2_fast(x):
    """Within 2^-22, of x from 2^-126 on; of less, that of 0."""
    if IS_INTERPRETED:
        logarithm = tl.log2(x)
    else:
        logarithm = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return logarithm


@triton.jit
def load_codes_if(is_read, slabs_ptr, starts, places, BITS: tl.constexpr, SIZE: tl.constexpr):
    """As `load_codes`; nothing is read, and they are of no meaning, unless is_read."""
    if BITS == 4:
        low = tl.load(slabs_ptr + starts + places, mask=is_read)
        high = low
    else:
        at = slabs_ptr + starts[:, None] + places[None, :]
        low = tl.load(at, mask=is_read)
        high = tl.load(at + 16 * SIZE, mask=is_read)
    return low, high


@triton.jit
def load_value_meta_if(is_read, meta_ptr, block_slabs, head, kv_heads, FORMATS: tl.constexpr):
    """As `load_value_meta`, and as `load_codes_if`."""
    BITS: tl.constexpr = FORMATS[1]
    GRAIN: tl.constexpr = FORMATS[3]
    slab, slabs = block_slabs
    if BITS // GRAIN == 4:  # of all 64 tokens
        slot = slab // GRAIN
        own = meta_ptr + (slot * kv_heads + head) * 128 + tl.arange(0, 64)
        scales = accumulated(tl.load(own, mask=is_read), 1, 2)
        zeros = accumulated(tl.load(own + 64, mask=is_read), 1, 2)
    else:
        places = ((slabs * kv_heads + head) * 128)[:, None] + tl.arange(0, 32)[None, :]
        scales = accumulated(tl.load(meta_ptr + places, mask=is_read), 2, 1)
        zeros = accumulated(tl.load(meta_ptr + 64 + places, mask=is_read), 2, 1)
    return scales, zeros


@triton.jit
def with_values(
    attended,
    attended_zeros,
    values,
    scales,
    zeros,
    weights,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The weighed codes, and the weighed zeros, with those of a block."""
    weights = (weights * scales.to(tl.float32)[None, :]).to(tl.float16)
    unshrunk = tl.full((ROWS,), 1.0, tl.float32)
    attended = added_values(attended, unshrunk, values, weights, 0, BITS, WIDTH, ROWS)
    weights = weights.permute(1, 0).reshape(64, ROWS)
    zeros = tl.broadcast_to(zeros[None, :], (16, 64))
    return attended, tl.dot(zeros, weights, attended_zeros)


@triton.jit
def attend_unskipped(
    query,
    factor,
    state,
    arenas,
    tables,
    blocks,
    skipping,
    head,
    kv_heads,
    FORMATS: tl.constexpr,
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `attend_quantised`, where a block has zero in `skips`; stores the masses of all -> (state,
    each lane's sums of weights of what was skipped, whether any was). skipping: skips, masses, how
    many a block has, by what they are raised and divided by WEIGHT."""
    SIZE: tl.constexpr = FORM[0]
    ROWS: tl.constexpr = FORM[1]
    KEY_BITS: tl.constexpr = FORMATS[0]
    VALUE_BITS: tl.constexpr = FORMATS[1]
    keys_ptr, values_ptr, key_meta_ptr, value_meta_ptr, num_keys, num_values = arenas
    greatest, total, attended, attended_zeros = state
    WIDTH: tl.constexpr = SIZE // 2
    nothing = tl.zeros((ROWS, 4), tl.float32)
    key_places = tl.arange(0, 256 // KEY_BITS * WIDTH)
    value_places = tl.arange(0, 256 // VALUE_BITS * WIDTH)
    slab_bytes, in_slab = kv_heads * (32 * SIZE), head * (32 * SIZE)
    skips_ptr, masses_ptr, group, raised = skipping
    row = tl.arange(0, ROWS)
    any_skipped, skipped = 0, nothing
    for block in tl.range(blocks[0], blocks[1], num_stages=STAGES):
        is_read = tl.load(skips_ptr + block) == 0
        value_slabs = slabs_of(tables[1], block, num_values, VALUE_BITS, FORMATS[3])
        key_slabs = slabs_of(tables[0], block, num_keys, KEY_BITS, FORMATS[2])
        key_starts = key_slabs[1] * slab_bytes + in_slab
        value_starts = value_slabs[1] * slab_bytes + in_slab
        key_slot = key_slabs[0] // FORMATS[2] * kv_heads + head
        keys = load_codes(keys_ptr, key_starts, key_places, KEY_BITS, SIZE)
        key_meta = load_key_meta(key_meta_ptr + key_slot * (2 * SIZE), 0, SIZE, 1)
        values = load_codes_if(is_read, values_ptr, value_starts, value_places, VALUE_BITS, SIZE)
        scales, zeros = load_value_meta_if(
            is_read, value_meta_ptr, value_slabs, head, kv_heads, FORMATS
        )
        scores = added_scores(0, query, keys, key_meta, 0, KEY_BITS, WIDTH, 1)
        weights, shrink, greatest, sums = weighed(
            first_rows(scores, ROWS, 64), factor, greatest, nothing, ROWS, 64
        )
        mass = greatest + log2_fast(tl.sum(sums, 1) + LOST) + raised
        tl.store(masses_ptr + block * group + row, mass, mask=row < group)
        total = total * shrink[:, None] + tl.where(is_read, sums, 0.0)
        skipped = skipped * shrink[:, None] + tl.where(is_read, 0.0, sums)
        any_skipped |= tl.where(is_read, 0, 1)
        attended = (attended[0] * shrink[None, :], attended[1] * shrink[None, :])
        attended_zeros *= shrink[None, :]
        if is_read:
            attended, attended_zeros = with_values(
                attended, attended_zeros, values, scales, zeros, weights, VALUE_BITS, WIDTH, ROWS
            )
    return (greatest, total, attended, attended_zeros), skipped, any_skipped


@triton.jit
def with_sums(state, lse):
    """Sums of exponentials of some rows more, [..., ROWS], as (greatest, total over it)."""
    greatest, total = state
    new_greatest = tl.maximum(greatest, tl.max(lse, 0))
    total = total * tl.exp2(greatest - new_greatest)
    return new_greatest, total + tl.sum(tl.exp2(lse - new_greatest[None, :]), 0)


@triton.jit
def merged_sums(one_ptr, other_ptr, num_runs, heads, group, ROWS: tl.constexpr, SUMS: tl.constexpr):
    """Two of all runs of a sequence, for the heads of a group, [ROWS], as logarithms to base 2."""
    row = tl.arange(0, ROWS)
    one = tl.full((ROWS,), LEAST, tl.float32), tl.zeros((ROWS,), tl.float32)
    other = one
    for start in range(0, num_runs, SUMS):
        split = start + tl.arange(0, SUMS)
        mask = (split < num_runs)[:, None] & (row < group)[None, :]
        places = split[:, None] * heads + row[None, :]
        of_one = tl.load(one_ptr + places, mask=mask, other=float("-inf"))
        of_other = tl.load(other_ptr + places, mask=mask, other=float("-inf"))
        one, other = with_sums(one, of_one), with_sums(other, of_other)
    return one[0] + tl.log2(one[1]), other[0] + tl.log2(other[1])


@triton.jit
def of_query(sums, nth, ROWS: tl.constexpr):
    """One of [ROWS]."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == nth, sums, 0.0), 0)


@triton.jit
def load_shares(masses_ptr, block, is_skipped, group, nth, lse, ROWS: tl.constexpr):
    """What skipped blocks weigh over what one query attended to, as logarithms to base 2; of others
    nothing."""
    masses = tl.load(masses_ptr + block * group + nth, mask=is_skipped, other=0.0)
    return tl.where(is_skipped, masses - of_query(lse, nth, ROWS), float("-inf"))


@triton.jit
def load_skipped(
    skips_ptr,
    masses_ptr,
    start,
    last,
    group,
    lse,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Of BLOCKS blocks from `start` on: which they are, which of them are skipped, and the greatest
    of their queries' shares."""
    block = start + tl.arange(0, BLOCKS)
    is_skipped = tl.load(skips_ptr + block, mask=block < last, other=0) != 0
    greatest = tl.full((BLOCKS,), float("-inf"), tl.float32)
    for nth in range(group):
        shares = load_shares(masses_ptr, block, is_skipped, group, nth, lse, ROWS)
        greatest = tl.maximum(greatest, shares)
    return block, is_skipped, greatest


@triton.jit
def limit_of_part(
    skips_ptr,
    masses_ptr,
    own,
    num_cold,
    group,
    lse,
    most,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    """Up to which share a block of the part that has the block `own` stays skipped: the greatest
    limit that is found at which no query skips more of it than the part's share of the most."""
    # Of no induction variable: pointers of each of its blocks would be one, and held in registers.
    start = own // PART * PART
    block, is_skipped, greatest = load_skipped(
        skips_ptr, masses_ptr, start, num_cold, group, lse, ROWS, PART
    )
    safe = most - MARGIN - tl.log2(num_cold.to(tl.float32))
    limit = safe + tl.log2(tl.minimum(num_cold - start, PART).to(tl.float32))
    allowed = tl.exp2(limit)
    for nth in range(group):
        weights = tl.exp2(load_shares(masses_ptr, block, is_skipped, group, nth, lse, ROWS))
        if tl.sum(tl.where(greatest <= limit, weights, 0.0), 0) > allowed:
            low, high = safe, limit
            for _ in range(NUM_HALVINGS):
                middle = (low + high) / 2
                fits = tl.sum(tl.where(greatest <= middle, weights, 0.0), 0) <= allowed
                low, high = tl.where(fits, middle, low), tl.where(fits, high, middle)
            limit = low
    return limit


@triton.jit
def attend_heavy(
    query,
    factor,
    state,
    lse,
    limit,
    arenas,
    tables,
    blocks,
    skipping,
    group,
    head,
    kv_heads,
    FORMATS: tl.constexpr,
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Skipped blocks of a share above the limit -> (state, with the sums over the others, [ROWS]).
    skipping: skips, masses, and what is left out in the end. state: with such sums."""
    ROWS: tl.constexpr = FORM[1]
    skips_ptr, masses_ptr, left_out_ptr = skipping
    attended, skipped = state
    for start in range(blocks[0], blocks[1], TILE):
        block, is_skipped, greatest = load_skipped(
            skips_ptr, masses_ptr, start, blocks[1], group, lse, ROWS, TILE
        )
        is_left_out = is_skipped & (greatest <= limit)
        for nth in range(group):
            shares = load_shares(masses_ptr, block, is_skipped, group, nth, lse, ROWS)
            more = tl.sum(tl.where(is_left_out, tl.exp2(shares) + LOST, 0.0), 0)
            skipped += tl.where(tl.arange(0, ROWS) == nth, more, 0.0)
        is_heavy = is_skipped & (is_left_out == 0)
        tl.store(left_out_ptr + block, 0, mask=is_heavy)
        counts = tl.cumsum(is_heavy.to(tl.int32), 0)
        listed = (start, tl.where(is_heavy, counts - 1, -1))
        these = (0, tl.max(counts, 0))
        attended = attend_quantised(
            query,
            factor,
            attended,
            arenas,
            tables,
            these,
            head,
            kv_heads,
            FORMATS,
            FORM,
            STAGES,
            listed,
        )
    return attended, skipped
