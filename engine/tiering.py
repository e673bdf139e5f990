"""EngineConfig -> which layers age alike, how many slabs they get, and the arenas of these."""

from collections.abc import Sequence
from dataclasses import replace

from engine.cache.block_address import CacheVersion
from engine.cache.calibration import Calibration
from engine.cache.epochs import Epochs
from engine.cache.kv_arenas import KvArenas, LayerGroup, sequence_bytes, share_out
from engine.cache.tier_config import TierConfig
from engine.cache.tier_group import TierGroup
from engine.config import CacheConfig
from engine.models.model_config import ModelConfig
from engine.ranks.group import Ranks
from engine.scheduling.tenure import ArenaGroup

ROTATION = "hadamard"
LAYOUT_VERSION = 1  # counts up when the same keys or values get other bytes in a slab


def tier_groups(
    layers_of: Sequence[tuple[tuple[int, ...], TierConfig]],
    local: ModelConfig,
    num_bytes: int,
    num_tokens: int,
) -> tuple[TierGroup, ...]:
    """Layers, and how their tokens age -> slabs out of `num_bytes` of memory, as decoding sequences
    of `num_tokens` tokens fill it. `local` counts the heads of this rank."""
    sizes = [LayerGroup(len(layers), local.num_kv_heads, local.head_dim) for layers, _ in layers_of]
    configs = [config for _, config in layers_of]
    pairs = list(zip(sizes, configs, strict=True))
    shares = [sequence_bytes(size, config, num_tokens) for size, config in pairs]
    groups = []
    for (layers, config), size, share in zip(layers_of, sizes, shares, strict=True):
        num_group_bytes = int(num_bytes * share / sum(shares))
        groups.append(
            TierGroup(config, layers, *share_out(num_group_bytes, size, config, num_tokens))
        )
    return tuple(groups)


def layers_by_config(
    cache: CacheConfig, num_layers: int, weights_sha: str
) -> list[tuple[tuple[int, ...], TierConfig]]:
    """Each layer in one of them, all with the same rule of ages. Raises EngineError for a
    calibration that cannot be read, or is of another model."""
    assert cache.tiers is not None
    if cache.calibration is None:
        return [(tuple(range(num_layers)), cache.tiers)]
    calibration = Calibration.read(cache.calibration)
    calibration.refuse_other_model(weights_sha, num_layers)
    return [
        (layers, replace(cache.tiers, cold_format=cold_format))
        for layers, cold_format in calibration.groups
    ]


def arena_groups(
    groups: Sequence[TierGroup], address: bytes, ranks: Ranks
) -> tuple[ArenaGroup, ...]:
    """Empty arenas. `address`: what the bytes of a block depend on besides its tokens and tiers."""
    epochs = Epochs()
    formats = [(group.layers, group.config.cold_format) for group in groups]
    return tuple(
        ArenaGroup(
            group.config,
            KvArenas.create(
                group.num_key_slabs, group.num_value_slabs, group.config, epochs=epochs
            ),
            CacheVersion(
                weights_sha=address.hex(),
                layer_group=" ".join(map(str, group.layers)),
                tp_size=ranks.size,
                tp_rank=ranks.rank,
                tiers=group.config,
                layout=LAYOUT_VERSION,
                rotation=ROTATION,
                calibration=repr(formats),  # what a layer gives, later ones are computed from
            ).digest(),
        )
        for group in groups
    )
