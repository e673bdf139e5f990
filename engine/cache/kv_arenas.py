"""The two arenas of one layer group, and how a budget of bytes is shared out between them."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from engine.cache.epochs import Epochs
from engine.cache.formats import Format, Part
from engine.cache.slab_arena import SlabArena
from engine.cache.tier_config import TierConfig

AFFINE_BYTES = 4  # a scale and a zero, both fp16


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """What the bytes of a slab follow from: the local KV heads of `num_layers` like layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def slab_bytes(self, config: TierConfig) -> int:
        """Of a block's INT4 keys, or values, in all layers of the group."""
        return self.num_layers * self.num_kv_heads * self.head_dim * config.block_size // 2

    def grain_bytes(self, config: TierConfig, part: Part) -> int:
        """Its slabs, and its metadata slot: scale and zero of every channel of a block's keys, of
        every token of its values."""
        densest = config.cold[part]
        payload = densest.num_slabs * self.slab_bytes(config)
        if densest is Format.BF16:
            return payload
        num_pairs = self.head_dim if part is Part.KEYS else config.block_size
        return payload + self.num_layers * self.num_kv_heads * num_pairs * AFFINE_BYTES


class KvArenas(NamedTuple):
    """And the steps that may read them."""

    keys: SlabArena
    values: SlabArena
    epochs: Epochs

    @classmethod
    def create(
        cls,
        num_key_slabs: int,
        num_value_slabs: int,
        config: TierConfig,
        *,
        epochs: Epochs | None = None,
        keeps_evicted: bool = False,
    ) -> Self:
        """`epochs`: those of other layer groups, where there are any."""
        epochs, cold = epochs or Epochs(), config.cold
        return cls(
            SlabArena(num_key_slabs, epochs, cold.keys, keeps_evicted=keeps_evicted),
            SlabArena(num_value_slabs, epochs, cold.values, keeps_evicted=keeps_evicted),
            epochs,
        )

    def of(self, part: Part) -> SlabArena:
        return self.keys if part is Part.KEYS else self.values

    def num_bytes(self, group: LayerGroup, config: TierConfig) -> int:
        """Payload and metadata of both."""
        return sum(self.of(part).num_grains * group.grain_bytes(config, part) for part in Part)


def share_out(
    num_bytes: int, group: LayerGroup, config: TierConfig, num_tokens: int
) -> tuple[int, int]:
    """Slabs of keys and of values that fit into `num_bytes`, in the proportion in which a decoding
    sequence of `num_tokens` tokens fills them."""
    num_sequences = num_bytes / sequence_bytes(group, config, num_tokens)
    keys, values = (
        int(num_sequences * _num_grains(config, num_tokens, part)) * config.cold[part].num_slabs
        for part in Part
    )
    return keys, values


def sequence_bytes(group: LayerGroup, config: TierConfig, num_tokens: int) -> float:
    """Of a decoding sequence of `num_tokens` tokens, metadata included."""
    return sum(
        _num_grains(config, num_tokens, part) * group.grain_bytes(config, part) for part in Part
    )


def _num_grains(config: TierConfig, num_tokens: int, part: Part) -> float:
    ages = config.decode_ages(num_tokens)
    return config.num_slabs(ages, num_tokens, part) / config.cold[part].num_slabs
