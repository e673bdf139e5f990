"""Formats of keys and values as they come back from a few bits: our own, and what peers do to them.

Of peers it is the arithmetic of a format that is emulated, not their kernels. Scales and least
values are float16 everywhere, where some spend fewer bits on them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.cache.formats import BLOCK_SIZE
from kernels.kv_quantise.reference import (
    dequantised_keys,
    dequantised_values,
    quantised_keys,
    quantised_values,
)
from kernels.tiered_append.hadamard import rotated

HALF_BYTES = 2
KEPT = 16  # bits of what is not rounded
MIN_SCALE = 2.0**-20  # of a grain whose values are all the same


@dataclass(frozen=True, slots=True)
class Grain:
    """How many tokens and channels of a head share a scale and a zero. None: all channels."""

    num_tokens: int = 1
    num_channels: int | None = None

    def meta_bytes(self, head_dim: int) -> float:
        """Of a token of a head."""
        num_grains = head_dim / (self.num_channels or head_dim) / self.num_tokens
        return 2 * HALF_BYTES * num_grains


BY_CHANNEL = Grain(BLOCK_SIZE, 1)
BY_TOKEN = Grain()
GROUP = 32


class Format(Protocol):
    """Of the keys and values of whole blocks."""

    def num_bytes(self, head_dim: int) -> float:
        """Of one token's key and value in one head, with scales and zeros."""

    def keys_back(self, keys: torch.Tensor) -> torch.Tensor:
        """keys [..., 64, num_heads, head_dim] -> what is read of them, as float32."""

    def values_back(self, values: torch.Tensor) -> torch.Tensor:
        """As `keys_back`."""


@dataclass(frozen=True, slots=True)
class OurFormat:
    """As our kernels store and read it: both are rotated before they are rounded, and what comes
    back is turned back."""

    key_bits: int
    value_bits: int

    def num_bytes(self, head_dim: int) -> float:
        codes = (self.key_bits + self.value_bits) * head_dim / 8
        return codes + BY_CHANNEL.meta_bytes(head_dim) + BY_TOKEN.meta_bytes(head_dim)

    @property
    def of_int8(self) -> "OurFormat":
        """What becomes of 8 bits, which are not rounded to 8 bits again."""
        kept = {8: KEPT}
        return OurFormat(
            kept.get(self.key_bits, self.key_bits), kept.get(self.value_bits, self.value_bits)
        )

    def keys_back(self, keys: torch.Tensor) -> torch.Tensor:
        if self.key_bits == KEPT:
            return keys.float()
        packed = quantised_keys(_by_heads(keys), self.key_bits)
        return _by_tokens(dequantised_keys(packed, self.key_bits, torch.float32))

    def values_back(self, values: torch.Tensor) -> torch.Tensor:
        if self.value_bits == KEPT:
            return values.float()
        packed = quantised_values(_by_heads(values), self.value_bits)
        return _by_tokens(dequantised_values(packed, self.value_bits, torch.float32))


@dataclass(frozen=True, slots=True)
class PeerFormat:
    """Affine codes over grains. `rotates`: as ours does, keys and values."""

    key_bits: int
    value_bits: int
    keys: Grain
    values: Grain
    rotates: bool = False

    def num_bytes(self, head_dim: int) -> float:
        codes = (self.key_bits + self.value_bits) * head_dim / 8
        return codes + self.keys.meta_bytes(head_dim) + self.values.meta_bytes(head_dim)

    def keys_back(self, keys: torch.Tensor) -> torch.Tensor:
        return self._back(keys, self.key_bits, self.keys)

    def values_back(self, values: torch.Tensor) -> torch.Tensor:
        return self._back(values, self.value_bits, self.values)

    def _back(self, exact: torch.Tensor, bits: int, grain: Grain) -> torch.Tensor:
        if self.rotates:
            return rotated(read_back(rotated(exact.float()), bits, grain))
        return read_back(exact.float(), bits, grain)


def _by_heads(tokens: torch.Tensor) -> torch.Tensor:
    return rotated(tokens.float()).transpose(-3, -2)


def _by_tokens(heads: torch.Tensor) -> torch.Tensor:
    return rotated(heads.transpose(-3, -2))


def read_back(exact: torch.Tensor, bits: int, grain: Grain) -> torch.Tensor:
    """exact [..., num_tokens, num_heads, head_dim] float32 -> like it: affine codes between the
    least and the greatest value of a grain, rounded half to even."""
    *others, num_tokens, num_heads, head_dim = exact.shape
    channels = grain.num_channels or head_dim
    shape = (*others, num_tokens // grain.num_tokens, grain.num_tokens, num_heads)
    grains = exact.reshape(*shape, head_dim // channels, channels)
    least, greatest = (each((-4, -1), keepdim=True) for each in (grains.amin, grains.amax))
    levels = 2**bits - 1
    scale = ((greatest - least) / levels).clamp_min(MIN_SCALE).half().float()
    zero = least.half().float()
    codes = ((grains - zero) / scale).round().clamp(0, levels)
    back: torch.Tensor = codes * scale + zero
    return back.reshape(exact.shape)


INT4, K8V4, INT8 = OurFormat(4, 4), OurFormat(8, 4), OurFormat(8, 8)
INT4_UNROTATED = PeerFormat(4, 4, BY_CHANNEL, BY_TOKEN)
INT4_BY_TOKEN_ROTATED = PeerFormat(4, 4, BY_TOKEN, BY_TOKEN, rotates=True)
INT4_BY_TOKEN = PeerFormat(4, 4, BY_TOKEN, BY_TOKEN)
KIVI_4 = PeerFormat(4, 4, Grain(GROUP, 1), Grain(1, GROUP))
KIVI_2 = PeerFormat(2, 2, Grain(GROUP, 1), Grain(1, GROUP))
