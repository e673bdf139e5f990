"""How a slab lies in memory: the one definition, in torch, for kernels, references and tests.

A slab has 64 tokens of 4 bits, 32 of 8, or 16 of bfloat16, of the keys or of the values of all KV
heads. Those of bfloat16 are [token, head, channel], as any paged cache. Of the others each head has
a part of 32 * size bytes, in the order in which the lanes of a warp own the operands of its
products (PTX ISA, mma.m16n8k16; of bytes a lane owns four neighbours):

- of a lane's four neighbours the middle two have changed places, for two masks unpack a word;
- of 4 bits, a byte has channel c in its low and channel c + size / 2 in its high nibble; of 8 bits,
  the two halves of the channels follow each other;
- keys are [token, lane, 16 channels, 4 of the lane's own], their tokens in the order of the columns
  of an accumulator; values are transposed, [channel, lane, 16 tokens, 4 of the lane's own].

A code stands for (code - BIAS + zero) * scale: zeros are counted in steps. Scales and zeros are
float16, each lane's own side by side: of keys one a channel and block, the same in all slots of a
block; of values one a token, those of a slot's tokens together. A slot is a slab's own, or that of
two neighbours, which a block of 8 bits then is (grains.py). Those of the high nibbles of keys are
kept as scale / 16 and 16 * zero, for the nibbles are read as 16 times what they are.
"""

import torch

BLOCK_TOKENS = 64
SLAB_TOKENS = {4: 64, 8: 32, 16: 16}
BIAS = {4: 8, 8: 128}
LEVELS = {4: 15, 8: 255}
HIGH_NIBBLE = 16


def part_bytes(size: int) -> int:
    """Of one head in a slab, whatever its format."""
    return 32 * size


def slabs_of_block(bits: int) -> int:
    return BLOCK_TOKENS // SLAB_TOKENS[bits]


def pack_keys(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [..., slab tokens, size] -> bytes [..., 32 * size]."""
    *lead, num_tokens, size = codes.shape
    rows = _in_accumulators(codes)
    split = rows.reshape(*lead, num_tokens, 2, size // 32, 4, 2, 2)  # half, 16s, lane, pair, place
    if bits == 4:
        return _nibbles(_permuted(split, len(lead), (0, 3, 2, 5, 4, 1)), len(lead))
    return _permuted(split, len(lead), (1, 0, 3, 2, 5, 4)).flatten(len(lead))


def unpack_keys(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_keys`."""
    *lead, num_bytes = packed.shape
    size, rows = num_bytes // 32, SLAB_TOKENS[bits]
    if bits == 4:
        split = _from_nibbles(packed).reshape(*lead, rows, 4, size // 32, 2, 2, 2)
        codes = _permuted(split, len(lead), (0, 5, 2, 1, 4, 3))
    else:
        split = packed.reshape(*lead, 2, rows, 4, size // 32, 2, 2)
        codes = _permuted(split, len(lead), (1, 0, 3, 2, 5, 4))
    return _from_accumulators(codes.reshape(*lead, rows, size))


def pack_values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [..., slab tokens, size] -> bytes [..., 32 * size]."""
    *lead, num_tokens, size = codes.shape
    tokens = (num_tokens // 16, 4, 2, 2)  # 16s, lane, pair, place
    if bits == 4:
        split = codes.reshape(*lead, *tokens, 2, size // 2)
        return _nibbles(_permuted(split, len(lead), (5, 1, 0, 3, 2, 4)), len(lead))
    split = codes.reshape(*lead, *tokens, 2, size // 32, 2, 8)  # half, 16s, rows of a lane, group
    return _permuted(split, len(lead), (4, 5, 7, 1, 6, 0, 3, 2)).flatten(len(lead))


def unpack_values(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_values`."""
    *lead, num_bytes = packed.shape
    size, num_tokens = num_bytes // 32, SLAB_TOKENS[bits]
    if bits == 4:
        split = _from_nibbles(packed).reshape(*lead, size // 2, 4, num_tokens // 16, 2, 2, 2)
        codes = _permuted(split, len(lead), (2, 1, 4, 3, 5, 0))
    else:
        split = packed.reshape(*lead, 2, size // 32, 8, 4, 2, num_tokens // 16, 2, 2)
        codes = _permuted(split, len(lead), (5, 3, 7, 6, 0, 1, 4, 2))
    return codes.reshape(*lead, num_tokens, size)


def pack_key_meta(each: torch.Tensor) -> torch.Tensor:
    """Scales or zeros of channels [..., size], in the order of a slot."""
    *lead, size = each.shape
    split = each.reshape(*lead, 2, size // 32, 4, 4)
    return _permuted(split, len(lead), (0, 2, 1, 3)).flatten(len(lead))


def unpack_key_meta(packed: torch.Tensor) -> torch.Tensor:
    *lead, size = packed.shape
    split = packed.reshape(*lead, 2, 4, size // 32, 4)
    return _permuted(split, len(lead), (0, 2, 1, 3)).flatten(len(lead))


def pack_value_meta(each: torch.Tensor) -> torch.Tensor:
    """Scales or zeros of a slot's tokens [..., slot tokens]."""
    *lead, num_tokens = each.shape
    split = each.reshape(*lead, num_tokens // 16, 4, 4)
    return _permuted(split, len(lead), (1, 0, 2)).flatten(len(lead))


def unpack_value_meta(packed: torch.Tensor) -> torch.Tensor:
    *lead, num_tokens = packed.shape
    split = packed.reshape(*lead, 4, num_tokens // 16, 4)
    return _permuted(split, len(lead), (1, 0, 2)).flatten(len(lead))


def high_nibble_factors(size: int, bits: int) -> torch.Tensor:
    """By what the zeros of keys are kept greater, and their scales smaller, [size]."""
    factors = torch.ones(size)
    if bits == 4:
        factors[size // 2 :] = HIGH_NIBBLE
    return factors


def _in_accumulators(each: torch.Tensor) -> torch.Tensor:
    """Of every 32 tokens [..., tokens, size], as 16s, lanes, pairs, places: the pairs first."""
    *lead, num_tokens, size = each.shape
    split = each.reshape(*lead, num_tokens // 32, 2, 4, 2, 2, size)
    return _permuted(split, len(lead), (0, 3, 1, 2, 4, 5)).reshape(each.shape)


def _from_accumulators(each: torch.Tensor) -> torch.Tensor:
    *lead, num_tokens, size = each.shape
    split = each.reshape(*lead, num_tokens // 32, 2, 2, 4, 2, size)
    return _permuted(split, len(lead), (0, 2, 3, 1, 4, 5)).reshape(each.shape)


def _permuted(each: torch.Tensor, num_lead: int, order: tuple[int, ...]) -> torch.Tensor:
    return each.permute(*range(num_lead), *(num_lead + axis for axis in order))


def _nibbles(codes: torch.Tensor, num_lead: int) -> torch.Tensor:
    """Low and high ones side by side, to bytes."""
    return (codes[..., 0] | codes[..., 1] << 4).flatten(num_lead)


def _from_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack((packed & 15, packed >> 4), -1)
