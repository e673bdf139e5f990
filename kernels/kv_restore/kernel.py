"""A program restores one head of a block. It reads words, four bytes that one lane owns, as they
lie in the slabs, puts the words into the order of the tokens and channels, and only then opens
them: what is moved is as small as it can be, and rows are read and written whole."""

import torch
import triton
import triton.language as tl

from kernels.kernel import kernel, variants
from kernels.kv_quantise.kernel import place_of_byte, slabs_at
from kernels.kv_restore.reference import (
    KEY_CONTRACT,
    SERVED_KEY_METAS,
    SERVED_VALUE_METAS,
    VALUE_CONTRACT,
)

SERVED_DTYPES = {"pages": [torch.bfloat16], "targets": [torch.int32]}


@triton.jit
def words_at(slabs_ptr, parts, half: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr):
    """One half of the channels of a block, [slabs, words]; of 4 bits, both halves. parts: of one
    head, which of all parts of slabs."""
    WORDS: tl.constexpr = 32 * SIZE // BITS
    place = tl.arange(0, WORDS) + (WORDS * half if BITS == 8 else 0)
    words_ptr = slabs_ptr.to(tl.pointer_type(tl.uint32))
    return tl.load(words_ptr + parts[:, None] * (8 * SIZE) + place[None, :])


@triton.jit
def shifts_of(half: tl.constexpr, BITS: tl.constexpr):
    """Of the four codes of a word, in the order of their channels or tokens."""
    return 8 * place_of_byte(tl.arange(0, 4)) + (4 * half if BITS == 4 else 0)


@triton.jit
def keys_of(words, half: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr):
    """One half of the channels, [64, SIZE / 2] float32."""
    MASK: tl.constexpr = 2**BITS - 1
    HALF: tl.constexpr = SIZE // 2
    # 32s of tokens, pair, 16s, lane, place; of channels lane, 16s
    words = words.reshape(2, 2, 2, 4, 2, 4, HALF // 16).permute(0, 2, 3, 1, 4, 6, 5)
    fours = words.reshape(64, HALF // 4)
    codes = (fours[:, :, None] >> shifts_of(half, BITS)[None, None, :]) & MASK
    return codes.reshape(64, HALF).to(tl.float32)


@triton.jit
def values_of(words, half: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr):
    """One half of the channels, [64, SIZE / 2] float32."""
    MASK: tl.constexpr = 2**BITS - 1
    HALF: tl.constexpr = SIZE // 2
    if BITS == 4:
        # Channels; of tokens lane, 16s
        words = words.reshape(HALF, 4, 4).permute(2, 1, 0)
    else:
        # Slab; 16s of channels, group; of tokens lane; rows of a lane; of tokens 16s
        words = words.reshape(2, HALF // 16, 8, 4, 2, 2).permute(0, 5, 3, 1, 4, 2)
    fours = words.reshape(16, HALF)
    codes = (fours[:, None, :] >> shifts_of(half, BITS)[None, :, None]) & MASK
    return codes.reshape(64, HALF).to(tl.float32)


@triton.jit
def affine_of_keys(meta_ptr, half: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Scales and zeros of one half of the channels, [1, SIZE / 2] float32."""
    HALF: tl.constexpr = SIZE // 2
    # Those of high nibbles are kept for codes that are read as 16 times what they are.
    FACTOR: tl.constexpr = 16 if BITS + half == 5 else 1
    place = meta_ptr + half * HALF + tl.arange(0, HALF)
    # Lane, 16s
    scale = tl.load(place).reshape(4, HALF // 16, 4).permute(1, 0, 2).reshape(HALF)
    zero = tl.load(place + SIZE).reshape(4, HALF // 16, 4).permute(1, 0, 2).reshape(HALF)
    return scale[None, :].to(tl.float32) * FACTOR, zero[None, :].to(tl.float32) * (1 / FACTOR)


@triton.jit
def affine_of_values(meta_ptr, parts, SLOTS: tl.constexpr):
    """Scales and zeros of the tokens of some slots, [64, 1] float32. parts: of one head, which of
    all parts of slots."""
    place = meta_ptr + parts[:, None] * 128 + tl.arange(0, 64 // SLOTS)[None, :]
    # Slot, lane, 16s
    scale = tl.load(place).reshape(SLOTS, 4, 4 // SLOTS, 4).permute(0, 2, 1, 3).reshape(64)
    zero = tl.load(place + 64).reshape(SLOTS, 4, 4 // SLOTS, 4).permute(0, 2, 1, 3).reshape(64)
    return scale[:, None].to(tl.float32), zero[:, None].to(tl.float32)


@triton.jit
def rows_at(pages_ptr, targets_ptr, block, head, num_pages, num_heads, SIZE: tl.constexpr):
    """Where the tokens of the page begin, [64, 1]."""
    page = tl.load(targets_ptr + block)
    tl.device_assert((page >= 0) & (page < num_pages), "a page beyond the last")
    token = page.to(tl.int64) * 64 + tl.arange(0, 64)
    return pages_ptr + ((token * num_heads + head) * SIZE)[:, None]


@triton.jit
def copy_tokens(
    slabs_ptr,
    sources_ptr,
    rows_ptr,
    head,
    num_slabs,
    num_heads,
    GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
):
    token, channel = tl.arange(0, 64), tl.arange(0, SIZE)[None, :]
    slab = slabs_at(sources_ptr, token // 16, num_slabs, GRAIN)
    tokens_ptr = slabs_ptr.to(tl.pointer_type(tl.bfloat16))
    place = ((slab * 16 + token % 16) * num_heads + head) * SIZE
    tokens = tl.load(tokens_ptr + place[:, None] + channel)
    tl.store(rows_ptr + channel, tokens.to(rows_ptr.dtype.element_ty))


@triton.jit
def store_half(rows_ptr, codes, scale, zero, half: tl.constexpr, BITS: tl.constexpr):
    """Of all rows, one half of the channels."""
    HALF: tl.constexpr = codes.shape[1]
    BIAS: tl.constexpr = 2 ** (BITS - 1)
    exact = (codes - BIAS + zero) * scale
    places = rows_ptr + half * HALF + tl.arange(0, HALF)[None, :]
    tl.store(places, exact.to(rows_ptr.dtype.element_ty))


@kernel(contract=KEY_CONTRACT, variants=variants(SERVED_DTYPES, SERVED_KEY_METAS, aligned=[True]))
def kv_restore_keys_kernel(
    slabs_ptr,
    meta_ptr,
    sources_ptr,
    pages_ptr,
    targets_ptr,
    num_slots,
    num_pages,
    num_heads,
    BITS: tl.constexpr,
    GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
):
    # Programs of the heads of one block follow each other: they write the same rows of memory.
    block, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    num_slabs = num_slots * GRAIN
    sources_ptr += block * (BITS // 4)
    rows_ptr = rows_at(pages_ptr, targets_ptr, block, head, num_pages, num_heads, SIZE)
    if BITS == 16:
        copy_tokens(slabs_ptr, sources_ptr, rows_ptr, head, num_slabs, num_heads, GRAIN, SIZE)
    else:
        nth = tl.arange(0, BITS // 4)
        parts = slabs_at(sources_ptr, nth, num_slabs, GRAIN) * num_heads + head
        slot = slabs_at(sources_ptr, 0, num_slabs, GRAIN) // GRAIN
        block_meta = meta_ptr + (slot * num_heads + head) * (2 * SIZE)
        words = words_at(slabs_ptr, parts, 0, BITS, SIZE)
        for half in tl.static_range(2):
            if BITS + half == 9:
                words = words_at(slabs_ptr, parts, 1, BITS, SIZE)
            scale, zero = affine_of_keys(block_meta, half, BITS, SIZE)
            codes = keys_of(words, half, BITS, SIZE)
            store_half(rows_ptr, codes, scale, zero, half, BITS)


@kernel(
    contract=VALUE_CONTRACT, variants=variants(SERVED_DTYPES, SERVED_VALUE_METAS, aligned=[True])
)
def kv_restore_values_kernel(
    slabs_ptr,
    meta_ptr,
    sources_ptr,
    pages_ptr,
    targets_ptr,
    num_slots,
    num_pages,
    num_heads,
    BITS: tl.constexpr,
    GRAIN: tl.constexpr,
    SIZE: tl.constexpr,
):
    block, head = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads
    num_slabs = num_slots * GRAIN
    sources_ptr += block * (BITS // 4)
    rows_ptr = rows_at(pages_ptr, targets_ptr, block, head, num_pages, num_heads, SIZE)
    if BITS == 16:
        copy_tokens(slabs_ptr, sources_ptr, rows_ptr, head, num_slabs, num_heads, GRAIN, SIZE)
    else:
        nth = tl.arange(0, BITS // 4)
        parts = slabs_at(sources_ptr, nth, num_slabs, GRAIN) * num_heads + head
        SLOTS: tl.constexpr = BITS // 4 // GRAIN
        first = tl.arange(0, SLOTS) * GRAIN
        slots = slabs_at(sources_ptr, first, num_slabs, GRAIN) // GRAIN
        scale, zero = affine_of_values(meta_ptr, slots * num_heads + head, SLOTS)
        words = words_at(slabs_ptr, parts, 0, BITS, SIZE)
        for half in tl.static_range(2):
            if BITS + half == 9:
                words = words_at(slabs_ptr, parts, 1, BITS, SIZE)
            codes = values_of(words, half, BITS, SIZE)
            store_half(rows_ptr, codes, scale, zero, half, BITS)
