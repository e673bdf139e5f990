"""The specification: affine codes between the least and the greatest value, rounded half to even.

Of keys a channel of a block shares a scale and a zero, of values a token of all channels. A scale
is at least a 1024th of the greatest magnitude, so that a zero is known to a quarter of a step:
channels far from zero lose bits, not their place. Scales beyond float16 stop at its greatest, and
one below 2^-14 is known to 2^-25 (of high nibbles 2^-21): the ends of such a range are off by 8e-6.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.contract import Contract, Count, InOut, Tensor
from kernels.kv_quantise.grains import grain_of
from kernels.kv_quantise.layout import (
    BIAS,
    BLOCK_TOKENS,
    LEVELS,
    high_nibble_factors,
    pack_key_meta,
    pack_keys,
    pack_value_meta,
    pack_values,
    slabs_of_block,
    unpack_key_meta,
    unpack_keys,
    unpack_value_meta,
    unpack_values,
)

KEY_CONTRACT, VALUE_CONTRACT = (
    Contract(
        f"kv_quantise_{what}",
        slabs=InOut("slots grain heads bytes", torch.uint8, wide_index=True),
        meta=InOut(f"slots heads 2 {meta_size}", torch.float16, wide_index=True),
        sources=Tensor("blocks from_slabs", torch.int32),
        targets=Tensor("blocks to_slabs", torch.int32),
        num_slots=Count("slots"),
        num_heads=Count("heads"),
    )
    for what, meta_size in (("keys", "size"), ("values", "64"))
)
FROM_TO_BITS = ((16, 8), (16, 4), (8, 4))
SIZES = (64, 128, 256)
TILE = 32  # channels of each half of the keys, or tokens of the values, that a program takes


def meta_of(from_bits: int, bits: int, grain: int, size: int) -> dict[str, int]:
    """What a kernel is launched with."""
    form = {"FROM_BITS": from_bits, "BITS": bits, "GRAIN": grain, "SIZE": size}
    return form | {"TILE": TILE, "num_warps": 4}


# Of heads of the usual size, to a cold tier of 8-bit keys and 4-bit values.
SERVED_KEY_METAS = [meta_of(16, 8, slabs_of_block(8), 128)]
SERVED_VALUE_METAS = [meta_of(*each, slabs_of_block(4), 128) for each in FROM_TO_BITS]
MAX_ZERO = 1024.0
MIN_SCALE = 2.0**-20  # a 16th of it is not zero in float16
MAX_SCALE = 65504.0


class Packed(NamedTuple):
    """Slabs of a block: bytes [..., slabs, 32 * size], and their metadata: of keys [..., slots, 2,
    size], of values [..., slots, 2, 64]; scales, then zeros."""

    bytes: torch.Tensor
    meta: torch.Tensor


def quantised_keys(keys: torch.Tensor, bits: int, grain: int = 1) -> Packed:
    """keys [..., 64, size] of one head."""
    size, num_slots = keys.shape[-1], slabs_of_block(bits) // grain
    factors = high_nibble_factors(size, bits)
    kept, zeros, codes = _affine(keys.float(), -2, bits, factors)
    meta = torch.stack([pack_key_meta(kept.squeeze(-2)), pack_key_meta(zeros.squeeze(-2))], -2)
    slabs = codes.unflatten(-2, (slabs_of_block(bits), -1))
    meta = meta.unsqueeze(-3).expand(*meta.shape[:-2], num_slots, 2, size)
    return Packed(pack_keys(slabs, bits), meta.contiguous())


def quantised_values(values: torch.Tensor, bits: int, grain: int = 1) -> Packed:
    """values [..., 64, size] of one head. What its metadata has no token for is zero."""
    num_slots = slabs_of_block(bits) // grain
    kept, zeros, codes = _affine(values.float(), -1, bits, torch.ones(1))
    slabs = codes.unflatten(-2, (slabs_of_block(bits), -1))
    shape = (*slabs.shape[:-3], num_slots, 2, BLOCK_TOKENS)
    meta = values.new_zeros(shape, dtype=torch.float16)
    for place, each in enumerate((kept, zeros)):
        packed = pack_value_meta(each.squeeze(-1).unflatten(-1, (num_slots, -1)))
        meta[..., place, : packed.shape[-1]] = packed
    return Packed(pack_values(slabs, bits), meta)


def quantise_keys(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    from_bits: int,
    bits: int,
) -> None:
    """slabs [num_slabs, heads, 32 * size] uint8 and meta [num_slabs // grain, heads, 2, size]
    float16, changed in place: each block of `sources` [num_blocks, slabs of a block of from_bits]
    goes to `targets` [num_blocks, slabs of a block of bits], slabs that nothing else names. Where
    the grain is 2, both name the slabs 2g and 2g + 1 side by side."""
    exact = blocks_of(slabs, meta, sources, from_bits, dequantised_keys)
    _store(slabs, meta, targets, quantised_keys(exact, bits, grain_of(slabs, meta)))


def quantise_values(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    from_bits: int,
    bits: int,
) -> None:
    """As `quantise_keys`, with meta [num_slabs // grain, heads, 2, 64]."""
    exact = blocks_of(slabs, meta, sources, from_bits, dequantised_values)
    _store(slabs, meta, targets, quantised_values(exact, bits, grain_of(slabs, meta)))


def blocks_of(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    bits: int,
    dequantised: Callable[[Packed, int, torch.dtype], torch.Tensor],
) -> torch.Tensor:
    """[num_blocks, heads, 64, size] bfloat16 of 16 bits, else float32, and computed in that."""
    heads, num_bytes = slabs.shape[1:]
    if bits == 16:
        tokens = slabs[sources.long()].view(torch.bfloat16)
        return tokens.view(len(sources), BLOCK_TOKENS, heads, num_bytes // 32).transpose(1, 2)
    slots = _slots_of(sources, grain_of(slabs, meta))
    packed = Packed(slabs[sources.long()].transpose(1, 2), meta[slots].transpose(1, 2))
    return dequantised(packed, bits, torch.float32)


def _store(slabs: torch.Tensor, meta: torch.Tensor, targets: torch.Tensor, packed: Packed) -> None:
    slabs[targets.long()] = packed.bytes.transpose(1, 2)
    meta[_slots_of(targets, grain_of(slabs, meta))] = packed.meta.transpose(1, 2)


def _slots_of(table: torch.Tensor, grain: int) -> torch.Tensor:
    return table[:, ::grain].long() // grain


def dequantised_keys(packed: Packed, bits: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[..., 64, size]: what the slabs of a block stand for; exact in float64."""
    codes = unpack_keys(packed.bytes, bits).flatten(-3, -2)
    first = packed.meta[..., 0, :, :]
    factors = high_nibble_factors(codes.shape[-1], bits).to(codes.device)
    scales = unpack_key_meta(first[..., 0, :]).to(dtype) * factors
    zeros = unpack_key_meta(first[..., 1, :]).to(dtype) / factors
    return (codes.to(dtype) - BIAS[bits] + zeros.unsqueeze(-2)) * scales.unsqueeze(-2)


def dequantised_values(
    packed: Packed, bits: int, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """[..., 64, size]: what the slabs of a block stand for; exact in float64."""
    codes = unpack_values(packed.bytes, bits).flatten(-3, -2)
    num_tokens = BLOCK_TOKENS // packed.meta.shape[-3]  # of a slot
    scales, zeros = (
        unpack_value_meta(each[..., :num_tokens]).flatten(-2)
        for each in packed.meta.to(dtype).unbind(-2)
    )
    return (codes.to(dtype) - BIAS[bits] + zeros.unsqueeze(-1)) * scales.unsqueeze(-1)


def _affine(
    exact: torch.Tensor, dim: int, bits: int, factors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales / factors and zeros * factors in float16, and codes of them."""
    factors = factors.to(exact.device)
    least, greatest = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    magnitude = torch.maximum(-least, greatest)
    scale = torch.maximum((greatest - least) / LEVELS[bits], magnitude / MAX_ZERO)
    kept = (scale.clamp(MIN_SCALE, MAX_SCALE) / factors).half()
    scale = kept.float() * factors
    kept_zero = ((least / scale + BIAS[bits]) * factors).half()
    zero = kept_zero.float() / factors
    codes = (exact / scale - zero + BIAS[bits]).clamp(0, LEVELS[bits]).round()
    return kept, kept_zero, codes.to(torch.uint8)
