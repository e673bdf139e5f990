"""What a program does with its share of a tier, block by block or slab by slab: scores, a step of
the softmax, weighed values.

Channels come in halves, low and high, as nibbles do. Heads of 256 are two parts, of each of which a
block is as a block of heads of 128: halves then come as low and high of the first part, low and
high of the second.

FORM: (SIZE, ROWS, PARTS). FORMATS: bits of keys and of values, grains of keys and of values.
"""

import triton
import triton.language as tl

from kernels.tiered_decode.tiles import (
    accumulated,
    bias_and_zeros,
    by_tokens,
    first_rows,
    keys_of_bytes,
    keys_of_nibbles,
    natural,
    no_tiles,
    own_of_part,
    pair_of,
    prefetch_slabs,
    slab_at,
    twice,
    values_of_bytes,
    values_of_nibbles,
    weighed,
)
from kernels.tiered_plan import kernel as fields


@triton.jit
def begin_cold(
    record_ptr, arenas, tables, head, kv_heads, FORMATS: tl.constexpr, SIZE: tl.constexpr
):
    """Where in its tables the cold blocks of a run's sequence begin, and which of them the run has:
    (first, after the last). The first is under way when this returns, though the kernel before,
    which stores no cold one, may not have ended. On an H200 two or four of them made int8 2 to 4 %
    slower, and int4 no faster."""
    cold_start = tl.load(record_ptr + fields.SINK_SLABS)
    first = tl.load(record_ptr + fields.FIRST_COLD)
    last = tl.load(record_ptr + fields.LAST_COLD)
    has_cold = first < last
    at_key = tables[0] + cold_start + first * (FORMATS[0] // 4)
    at_value = tables[1] + cold_start + first * (FORMATS[1] // 4)
    key = tl.load(at_key, mask=has_cold, other=0)
    value = tl.load(at_value, mask=has_cold, other=0)
    prefetch_slabs(arenas, key, value, head, kv_heads, FORMATS[2], FORMATS[3], SIZE)
    return cold_start, (first, last)


@triton.jit
def slabs_of(table_ptr, block, num_slabs, BITS: tl.constexpr, GRAIN: tl.constexpr):
    """The first slab of a block, and all that it has: of 4 bits that one, of 8 bits [2]."""
    place = table_ptr + block * (BITS // 4)
    slab = slab_at(place, num_slabs)
    return slab, pair_of(slab, place, num_slabs, GRAIN) if BITS == 8 else slab


@triton.jit
def load_codes(slabs_ptr, starts, places, BITS: tl.constexpr, SIZE: tl.constexpr):
    """The bytes of both halves of a part, which of 4 bits are the same. starts: of the head's parts
    of slabs."""
    if BITS == 4:
        low = tl.load(slabs_ptr + starts + places)
        high = low
    else:
        at = slabs_ptr + starts[:, None] + places[None, :]
        low, high = tl.load(at), tl.load(at + 16 * SIZE)
    return low, high


@triton.jit
def load_key_meta(meta_ptr, part, SIZE: tl.constexpr, PARTS: tl.constexpr):
    """Scales of both halves of a part, and their zeros, as accumulators have them."""
    HALF: tl.constexpr = SIZE // 2
    TILES: tl.constexpr = HALF // 32 // PARTS
    own = meta_ptr + own_of_part(part, 32 * TILES, 8 * TILES, PARTS)
    scales_low = accumulated(tl.load(own), 1, TILES)
    scales_high = accumulated(tl.load(own + HALF), 1, TILES)
    zeros_low = accumulated(tl.load(own + SIZE), 1, TILES)
    zeros_high = accumulated(tl.load(own + (SIZE + HALF)), 1, TILES)
    return scales_low, scales_high, zeros_low, zeros_high


@triton.jit
def load_value_meta(meta_ptr, block_slabs, head, kv_heads, BITS: tl.constexpr, GRAIN: tl.constexpr):
    """Scales and zeros of 64 tokens, as accumulators have them."""
    slab, slabs = block_slabs
    if BITS // GRAIN == 4:  # of all 64 tokens
        slot = slab // GRAIN
        own = meta_ptr + (slot * kv_heads + head) * 128 + tl.arange(0, 64)
        scales = accumulated(tl.load(own), 1, 2)
        zeros = accumulated(tl.load(own + 64), 1, 2)
    else:
        places = ((slabs * kv_heads + head) * 128)[:, None] + tl.arange(0, 32)[None, :]
        scales = accumulated(tl.load(meta_ptr + places), 2, 1)
        zeros = accumulated(tl.load(meta_ptr + 64 + places), 2, 1)
    return scales, zeros


@triton.jit
def added_scores(
    scores, query, keys, meta, part, BITS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr
):
    """[16, 64 tokens as accumulators have them], with those of a part of the channels."""
    packed_low, packed_high = keys
    scales_low, scales_high, zeros_low, zeros_high = meta
    scaled_low = query[2 * part] * scales_low[None, :]
    scaled_high = query[2 * part + 1] * scales_high[None, :]
    if PARTS > 1:
        scaled_low, scaled_high = twice(scaled_low, WIDTH), twice(scaled_high, WIDTH)
    LOW_BIAS: tl.constexpr = -1032.0 if BITS == 4 else -1152.0
    biased = bias_and_zeros(scaled_low, zeros_low, LOW_BIAS, WIDTH)
    biased += bias_and_zeros(scaled_high, zeros_high, -1152.0, WIDTH)
    biased = tl.broadcast_to(biased[:, None, :], (16, 8, 8)).reshape(16, 64)
    scores = biased if part == 0 else scores + biased
    if BITS == 4:
        keys_low, keys_high = keys_of_nibbles(packed_low, WIDTH)
    else:
        keys_low, keys_high = keys_of_bytes(packed_low, WIDTH), keys_of_bytes(packed_high, WIDTH)
    scores = tl.dot(natural(scaled_low, 16, WIDTH), keys_low, scores)
    return tl.dot(natural(scaled_high, 16, WIDTH), keys_high, scores)


@triton.jit
def added_values(
    attended,
    shrink,
    values,
    weights,
    part,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Both halves of a part of what was attended, and the weighed codes."""
    packed_low, packed_high = values
    if BITS == 4:
        low, high = values_of_nibbles(packed_low, WIDTH)
    else:
        low, high = values_of_bytes(packed_low, WIDTH), values_of_bytes(packed_high, WIDTH)
    by_token = by_tokens(weights, ROWS)
    low = tl.dot(low, by_token, attended[2 * part] * shrink[None, :])
    return low, tl.dot(high, by_token, attended[2 * part + 1] * shrink[None, :])


@triton.jit
def block_of_list(listed, nth):
    """listed: a first block, and of that and those after it their places in the list, [blocks]; of
    others none."""
    first, places = listed
    offset = tl.arange(0, places.shape[0])
    return first + tl.sum(tl.where(places == nth, offset, 0), 0)


@triton.jit
def attend_quantised(
    query,
    factor,
    state,
    arenas,
    tables,
    blocks,
    head,
    kv_heads,
    FORMATS: tl.constexpr,
    FORM: tl.constexpr,
    STAGES: tl.constexpr,
    listed=None,
):
    """blocks: the first of a tier of one format, or place in `listed`, and the one past the last.
    Loads of one part are all under way at once, of several where they are used, for registers."""
    SIZE: tl.constexpr = FORM[0]
    ROWS: tl.constexpr = FORM[1]
    PARTS: tl.constexpr = FORM[2]
    KEY_BITS: tl.constexpr = FORMATS[0]
    VALUE_BITS: tl.constexpr = FORMATS[1]
    keys_ptr, values_ptr, key_meta_ptr, value_meta_ptr, num_keys, num_values = arenas
    greatest, total, attended, attended_zeros = state
    WIDTH: tl.constexpr = SIZE // 2 // PARTS
    VALUE_BYTES: tl.constexpr = 256 // VALUE_BITS * WIDTH
    slab_bytes, in_slab = kv_heads * (32 * SIZE), head * (32 * SIZE)
    for nth in tl.range(blocks[0], blocks[1], num_stages=STAGES):
        block = nth if listed is None else block_of_list(listed, nth)
        value_slabs = slabs_of(tables[1], block, num_values, VALUE_BITS, FORMATS[3])
        key_slabs = slabs_of(tables[0], block, num_keys, KEY_BITS, FORMATS[2])
        key_starts = key_slabs[1] * slab_bytes + in_slab
        value_starts = value_slabs[1] * slab_bytes + in_slab
        key_slot = key_slabs[0] // FORMATS[2] * kv_heads + head
        scores = tl.zeros((16, 64), tl.float32)
        for part in tl.static_range(PARTS):
            places = own_of_part(part, 256 // KEY_BITS * WIDTH, WIDTH // 4, PARTS)
            keys = load_codes(keys_ptr, key_starts, places, KEY_BITS, SIZE)
            key_meta = load_key_meta(key_meta_ptr + key_slot * (2 * SIZE), part, SIZE, PARTS)
            if PARTS == 1:
                places = tl.arange(0, VALUE_BYTES)
                values = load_codes(values_ptr, value_starts, places, VALUE_BITS, SIZE)
            if part == PARTS - 1:
                scales, zeros = load_value_meta(
                    value_meta_ptr, value_slabs, head, kv_heads, VALUE_BITS, FORMATS[3]
                )
            scores = added_scores(scores, query, keys, key_meta, part, KEY_BITS, WIDTH, PARTS)
        scores = first_rows(scores, ROWS, 64)
        weights, shrink, greatest, total = weighed(scores, factor, greatest, total, ROWS, 64)
        weights = (weights * scales.to(tl.float32)[None, :]).to(tl.float16)
        added = no_tiles()
        for part in tl.static_range(PARTS):
            if PARTS > 1:
                places = part * VALUE_BYTES + tl.arange(0, VALUE_BYTES)
                values = load_codes(values_ptr, value_starts, places, VALUE_BITS, SIZE)
            added += added_values(attended, shrink, values, weights, part, VALUE_BITS, WIDTH, ROWS)
        attended = added
        zeros = tl.broadcast_to(zeros[None, :], (16, 64))
        weights = weights.permute(1, 0).reshape(64, ROWS)
        attended_zeros = tl.dot(zeros, weights, attended_zeros * shrink[None, :])
    return greatest, total, attended, attended_zeros


@triton.jit
def added_tokens(attended, shrink, values_ptr, in_slab, is_token, weights, FORM: tl.constexpr):
    """All halves, as `added_values` has those of a part, of a slab of bfloat16."""
    SIZE: tl.constexpr = FORM[0]
    PARTS: tl.constexpr = FORM[2]
    WIDTH: tl.constexpr = SIZE // 2 // PARTS
    # Zero where there is no token: what was in a slab before may be NaN, and zero times it.
    is_loaded = tl.broadcast_to(is_token[:, None], (16, WIDTH))
    weights = weights.permute(1, 0).reshape(16, FORM[1])
    coarse = weights.to(tl.bfloat16)
    fine = (weights - coarse.to(tl.float32)).to(tl.bfloat16)
    added = no_tiles()
    for part in tl.static_range(PARTS):
        low = values_ptr + (in_slab + (part * WIDTH + tl.arange(0, WIDTH))[None, :])
        if PARTS == 1:
            values_low = tl.load(low, mask=is_loaded, other=0.0)
            values_high = tl.load(low + SIZE // 2, mask=is_loaded, other=0.0)
        else:  # on their way in shared memory, not in registers
            values_low = tl.where(is_loaded, tl.load(low), 0.0)
            values_high = tl.where(is_loaded, tl.load(low + SIZE // 2), 0.0)
        values_low, values_high = tl.trans(values_low), tl.trans(values_high)
        attended_low = tl.dot(values_low, coarse, attended[2 * part] * shrink[None, :])
        attended_low = tl.dot(values_low, fine, attended_low)
        attended_high = tl.dot(values_high, coarse, attended[2 * part + 1] * shrink[None, :])
        added += (attended_low, tl.dot(values_high, fine, attended_high))
    return added


@triton.jit
def attend_tokens(
    query,
    factor,
    state,
    arenas,
    tables,
    record_ptr,
    first_row,
    head,
    kv_heads,
    FORM: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Slabs of bfloat16: of the sink, and of the hot tier, whose last one is filled in part. They
    come first, before there are zeros. What a query must not see is among them: the tokens after
    its own, which are the last of these."""
    SIZE: tl.constexpr = FORM[0]
    ROWS: tl.constexpr = FORM[1]
    PARTS: tl.constexpr = FORM[2]
    WIDTH: tl.constexpr = SIZE // PARTS
    greatest, total, attended, attended_zeros = state
    sink_slabs = tl.load(record_ptr + fields.SINK_SLABS)
    key_skip = tl.load(record_ptr + fields.KEY_SKIP)
    value_skip = tl.load(record_ptr + fields.VALUE_SKIP)
    num_tokens = tl.load(record_ptr + fields.NUM_TOKENS)
    if QUERY_LEN > 1:
        nth_query = (first_row + tl.arange(0, ROWS)) % QUERY_LEN
        first_hidden = num_tokens - QUERY_LEN + 1 + nth_query
    key_slabs_ptr, value_slabs_ptr, _, _, num_keys, num_values = arenas
    key_table_ptr, value_table_ptr = tables
    keys_ptr = key_slabs_ptr.to(tl.pointer_type(tl.bfloat16))
    values_ptr = value_slabs_ptr.to(tl.pointer_type(tl.bfloat16))
    token = tl.arange(0, 16)
    row_stride = kv_heads * SIZE
    in_slab = token[:, None] * row_stride + head * SIZE
    first = tl.load(record_ptr + fields.FIRST_TOKEN_SLAB)
    last = tl.load(record_ptr + fields.LAST_TOKEN_SLAB)
    for slab in tl.range(first, last, num_stages=STAGES if PARTS == 1 else 2):
        is_hot = slab >= sink_slabs
        key_slab = slab_at(key_table_ptr + slab + tl.where(is_hot, key_skip, 0), num_keys)
        value_slab = slab_at(value_table_ptr + slab + tl.where(is_hot, value_skip, 0), num_values)
        place = slab * 16 + token
        is_token = place < num_tokens
        keys = no_tiles()
        for part in tl.static_range(PARTS):
            places = in_slab + (part * WIDTH + tl.arange(0, WIDTH))[None, :]
            keys += (tl.load(keys_ptr + key_slab * (16 * row_stride) + places),)

        scores = tl.dot(query[0], tl.trans(keys[0]))
        for part in tl.static_range(1, PARTS):
            scores = tl.dot(query[part], tl.trans(keys[part]), scores)
        scores = first_rows(scores, ROWS, 16)
        is_seen = place[None, :] < first_hidden[:, None] if QUERY_LEN > 1 else is_token[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        weights, shrink, greatest, total = weighed(scores, factor, greatest, total, ROWS, 16)
        values_at = values_ptr + value_slab * (16 * row_stride)
        attended = added_tokens(attended, shrink, values_at, in_slab, is_token, weights, FORM)
    return greatest, total, attended, attended_zeros
