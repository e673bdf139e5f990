"""Sequences of the same tiers as a cache stores them, quantised on their device."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kernels.kv_quantise.layout import BLOCK_TOKENS, SLAB_TOKENS, slabs_of_block
from kernels.kv_quantise.reference import quantised_keys, quantised_values
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.reference import TOKEN_BITS, WARM_BITS, Formats
from kernels.tiered_skip.rounding import reach_of_blocks, reach_of_tokens

SINK_TOKENS, WARM_TOKENS, HOT_TOKENS = 64, 512, 128


@dataclass(frozen=True)
class Stored:
    """bounds: of each sequence the same. reach [num_sequences, num_kv_heads]."""

    slabs: Slabs
    key_tables: torch.Tensor
    value_tables: torch.Tensor
    bounds: tuple[int, int, int, int]
    formats: Formats
    reach: torch.Tensor

    @property
    def num_cold(self) -> int:
        return (self.bounds[1] - self.bounds[0]) // BLOCK_TOKENS


def tiers_of(length: int, warm: int = WARM_TOKENS) -> tuple[int, int, int, int]:
    """Where sink, cold, warm and hot tier end, by whole blocks."""
    hot = (length - HOT_TOKENS) // BLOCK_TOKENS * BLOCK_TOKENS
    return SINK_TOKENS, hot - warm, hot, length


def store(
    keys: torch.Tensor, values: torch.Tensor, bounds: tuple[int, int, int, int], formats: Formats
) -> Stored:
    """keys, values [num_sequences, num_kv_heads, length, size] bfloat16; a cold tier whose values
    are of 4 bits."""
    arenas, tables = [], []
    for tokens, bits, is_keys in (
        (keys, formats.key_bits, True),
        (values, formats.value_bits, False),
    ):
        grain = slabs_of_block(bits)
        parts = [_tokens(tokens[:, :, : bounds[0]], grain, is_keys=is_keys)]
        for start, end, each in (
            (bounds[0], bounds[1], bits),
            (bounds[1], bounds[2], WARM_BITS),
        ):
            parts.append(_blocks(tokens[:, :, start:end], each, grain, is_keys=is_keys))
        parts.append(_tokens(tokens[:, :, bounds[2] : bounds[3]], grain, is_keys=is_keys))
        slabs, meta = (torch.cat(each, 1) for each in zip(*parts, strict=True))
        arenas.append((slabs.flatten(0, 1).contiguous(), meta.flatten(0, 1).contiguous()))
        ids = torch.arange(slabs.shape[0] * slabs.shape[1], device=slabs.device)
        tables.append(ids.int().view(slabs.shape[:2]))
    (key_slabs, key_meta), (value_slabs, value_meta) = arenas
    slabs = Slabs(key_slabs, value_slabs, key_meta, value_meta)
    reach = _reach(keys, key_meta, bounds, formats)
    return Stored(slabs, *tables, bounds, formats, reach)


def _tokens(
    tokens: torch.Tensor, grain: int, *, is_keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slabs [num_sequences, slabs, num_kv_heads, bytes] of bfloat16, whole grains of them, and
    their metadata, which says nothing."""
    num_sequences, num_kv_heads, num_tokens, size = tokens.shape
    num_slabs = -(-num_tokens // (SLAB_TOKENS[TOKEN_BITS] * grain)) * grain
    tokens = pad(tokens, (0, 0, 0, num_slabs * SLAB_TOKENS[TOKEN_BITS] - num_tokens))
    slabs = tokens.transpose(1, 2).reshape(num_sequences, num_slabs, -1, num_kv_heads, size)
    slabs = slabs.contiguous().view(torch.uint8)
    shape = (num_sequences, num_slabs // grain, num_kv_heads, 2, size if is_keys else BLOCK_TOKENS)
    meta = torch.zeros(shape, dtype=torch.float16, device=tokens.device)
    return slabs.view(num_sequences, num_slabs, num_kv_heads, 32 * size), meta


def _blocks(
    tokens: torch.Tensor, bits: int, grain: int, *, is_keys: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    quantised = quantised_keys if is_keys else quantised_values
    packed = quantised(tokens.unflatten(2, (-1, BLOCK_TOKENS)), bits, grain)
    # [sequence, KV head, block, slab or slot, ...]: heads after slabs
    slabs = packed.bytes.permute(0, 2, 3, 1, 4).flatten(1, 2)
    return slabs, packed.meta.permute(0, 2, 3, 1, 4, 5).flatten(1, 2)


def _reach(
    keys: torch.Tensor,
    key_meta: torch.Tensor,
    bounds: tuple[int, int, int, int],
    formats: Formats,
) -> torch.Tensor:
    sink, cold, warm, _ = bounds
    size, grain = keys.shape[-1], slabs_of_block(formats.key_bits)
    plain = torch.cat([keys[:, :, :sink], keys[:, :, warm:]], 2).float().norm(dim=-1).amax(2)
    reach = reach_of_tokens(plain, size)
    meta = key_meta.unflatten(0, (len(keys), -1))
    first = sink // SLAB_TOKENS[TOKEN_BITS] // grain
    for num_tokens, bits in ((cold - sink, formats.key_bits), (warm - cold, WARM_BITS)):
        last = first + num_tokens // BLOCK_TOKENS * (slabs_of_block(bits) // grain)
        if last > first:
            reach = torch.maximum(reach, reach_of_blocks(meta[:, first:last], bits).amax(1))
        first = last
    return reach.contiguous()
