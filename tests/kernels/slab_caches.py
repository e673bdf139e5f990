"""Sequences in slabs of several formats as an attention kernel must take them: slabs in any order,
NaN in every place that no token holds, table entries past a sequence's slabs that are none. An
arena has grains of as many slabs as a block of its cold format, unless it is to have others."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from kernels.kv_quantise.layout import BLOCK_TOKENS, SLAB_TOKENS, slabs_of_block
from kernels.kv_quantise.reference import quantised_keys, quantised_values
from kernels.launch import cdiv
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.reference import TOKEN_BITS, WARM_BITS, Formats

NO_SLAB = 2**30
Stored = tuple[torch.Tensor, torch.Tensor | None]  # a slab, and what its slot holds


class Cache(NamedTuple):
    """bounds [num_sequences, 4] int32."""

    slabs: Slabs
    key_tables: torch.Tensor
    value_tables: torch.Tensor
    bounds: torch.Tensor


def bounds_of(
    lengths: Sequence[int], sink: int = 64, hot: int = 128, warm: int = 512
) -> torch.Tensor:
    """Of tiers by whole blocks: the last `hot` tokens or a few more, `warm` before them."""
    bounds = []
    for length in lengths:
        end = max(0, length - hot) // BLOCK_TOKENS * BLOCK_TOKENS
        first = min(sink, end)
        cold = max(first, end - warm)
        bounds.append([first, cold, end, length])
    return torch.tensor(bounds, dtype=torch.int32).view(-1, 4)


def tokens_of(length: int, num_kv_heads: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_kv_heads, length, size, generator=generator).bfloat16()


def slab_cache(
    bounds: torch.Tensor,
    num_kv_heads: int,
    size: int,
    formats: Formats,
    keys: Sequence[torch.Tensor] | None = None,
    values: Sequence[torch.Tensor] | None = None,
    grains: Sequence[int] | None = None,
) -> Cache:
    """keys, values: of each sequence [num_kv_heads, length, size] bfloat16; random, if None.
    grains: of keys and of values."""
    arenas = []
    of_keys, of_values = grains or map(slabs_of_block, formats)
    for is_keys, bits, grain, given in (
        (True, formats.key_bits, of_keys, keys),
        (False, formats.value_bits, of_values, values),
    ):
        lengths = bounds[:, 3].tolist()
        if given is None:
            given = [
                tokens_of(length, num_kv_heads, size, 2 * row + is_keys)
                for row, length in enumerate(lengths)
            ]
        found = [
            list(_slabs_of(each, row, bits, grain, is_keys=is_keys))
            for row, each in zip(bounds.tolist(), given, strict=True)
        ]
        meta_size = size if is_keys else BLOCK_TOKENS
        arenas.append(_arena(found, num_kv_heads, size, meta_size, grain))
    (key_slabs, key_meta, key_tables), (value_slabs, value_meta, value_tables) = arenas
    return Cache(
        Slabs(key_slabs, value_slabs, key_meta, value_meta), key_tables, value_tables, bounds
    )


def _arena(
    found: Sequence[Sequence[Stored]], num_kv_heads: int, size: int, meta_size: int, grain: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slabs, metadata and tables of keys, or of values."""
    num_slots = sum(cdiv(len(each), grain) for each in found) + 1
    shape = (num_slots * grain, num_kv_heads, 16 * size)
    arena = torch.full(shape, float("nan"), dtype=torch.bfloat16).view(torch.uint8)
    shape = (num_slots, num_kv_heads, 2, meta_size)
    meta = torch.full(shape, float("nan"), dtype=torch.float16)
    tables = torch.full((len(found), max(map(len, found), default=0) + 1), NO_SLAB)
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(num_slots)).tolist()
    for table, slabs in zip(tables, found, strict=True):
        for place, (slab, slot_meta) in enumerate(slabs):
            if place % grain == 0:
                slot = order.pop()
            table[place] = chosen = slot * grain + place % grain
            arena[chosen] = slab
            if slot_meta is not None:
                meta[slot] = slot_meta
    return arena, meta, tables.int()


def _slabs_of(
    tokens: torch.Tensor, bounds: Sequence[int], bits: int, grain: int, *, is_keys: bool
) -> Iterator[Stored]:
    sink, cold, warm, length = bounds
    yield from _token_slabs(tokens[:, :sink])
    for begin, end, each_bits in ((sink, cold, bits), (cold, warm, WARM_BITS)):
        for start in range(begin, end, BLOCK_TOKENS):
            quantised = quantised_keys if is_keys else quantised_values
            packed = quantised(tokens[:, start : start + BLOCK_TOKENS], each_bits, grain)
            for slab in range(slabs_of_block(each_bits)):
                yield packed.bytes[:, slab], packed.meta[:, slab // grain]
    yield from _token_slabs(tokens[:, warm:length])


def _token_slabs(tokens: torch.Tensor) -> Iterator[Stored]:
    num_kv_heads, num_tokens, size = tokens.shape
    for start in range(0, cdiv(num_tokens, SLAB_TOKENS[TOKEN_BITS]) * 16, 16):
        slab = torch.full((16, num_kv_heads, size), float("nan"), dtype=torch.bfloat16)
        part = tokens[:, start : start + 16].transpose(0, 1)
        slab[: len(part)] = part
        yield slab.view(torch.uint8).view(num_kv_heads, 32 * size), None
