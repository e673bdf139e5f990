"""The KV cache of one rank whose tokens age: slabs of any format, in arenas by layer group."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from engine.cache.formats import BLOCK_SIZE, Format, Part
from engine.cache.tier_config import TierConfig
from engine.cache.tier_group import TierGroup
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.reference import Formats

BITS = {Format.BF16: 16, Format.INT8: 8, Format.INT4: 4}


@dataclass(frozen=True, slots=True)
class TieredKV:
    """`layers`: of each layer, in order, the slabs and their metadata. `whole`: of each group, all
    slabs of its first layer, then of the next one: what is slab s of a layer is there slab
    `num_slabs * n + s`, n being the layer's place in the group.

    Zeroed at the start. What follows a sequence's last token in its slab may be anything, not even
    a number: another format's codes.
    """

    groups: tuple[TierGroup, ...]
    whole: tuple[Slabs, ...]
    layers: tuple[Slabs, ...]
    group_of: tuple[int, ...]  # by layer

    @classmethod
    def allocate(
        cls, groups: Items[TierGroup], num_kv_heads: int, head_dim: int, device: torch.device
    ) -> TieredKV:
        """`num_kv_heads` of this rank; every layer is in one of `groups`."""
        whole = tuple(_allocate(group, num_kv_heads, head_dim, device) for group in groups)
        places = {
            layer: (number, nth)
            for number, group in enumerate(groups)
            for nth, layer in enumerate(group.layers)
        }
        assert sorted(places) == list(range(sum(group.num_layers for group in groups)))
        of_layers = [places[layer] for layer in range(len(places))]
        layers = tuple(
            Slabs(*(each.chunk(groups[number].num_layers)[nth] for each in whole[number]))
            for number, nth in of_layers
        )
        return cls(tuple(groups), whole, layers, tuple(number for number, _ in of_layers))

    def __str__(self) -> str:
        return ", ".join(
            f"{group.num_key_slabs} and {group.num_value_slabs} slabs of keys and values in "
            f"{group.num_layers} layers, cold ones {group.config.cold_format}"
            for group in self.groups
        )

    @property
    def device(self) -> torch.device:
        return self.whole[0].keys.device

    @property
    def num_kv_heads(self) -> int:
        return self.whole[0].keys.shape[1]

    @property
    def head_dim(self) -> int:
        return self.whole[0].key_meta.shape[-1]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for slabs in self.whole for each in slabs)


def formats_of(config: TierConfig) -> Formats:
    """Of the cold tier, as the kernels count them."""
    return Formats(BITS[config.cold.keys], BITS[config.cold.values])


def _allocate(group: TierGroup, num_kv_heads: int, head_dim: int, device: torch.device) -> Slabs:
    def zeros(part: Part, num_slabs: int, num_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
        grain = group.config.cold[part].num_slabs
        assert num_slabs % grain == 0, (num_slabs, grain)
        num_all, slab_bytes = num_slabs * group.num_layers, head_dim * BLOCK_SIZE // 2
        shape = (num_all // grain, num_kv_heads, 2, num_pairs)
        return (
            torch.zeros((num_all, num_kv_heads, slab_bytes), dtype=torch.uint8, device=device),
            torch.zeros(shape, dtype=torch.float16, device=device),
        )

    keys, key_meta = zeros(Part.KEYS, group.num_key_slabs, head_dim)
    values, value_meta = zeros(Part.VALUES, group.num_value_slabs, BLOCK_SIZE)
    return Slabs(keys, values, key_meta, value_meta)
