"""What the arenas of one layer group are made of: told by who holds the bytes to who deals them."""

from dataclasses import dataclass

from engine.cache.tier_config import TierConfig


@dataclass(frozen=True, slots=True)
class TierGroup:
    """Layers whose tokens age alike. A slab id stands for the same slab in each of them."""

    config: TierConfig
    layers: tuple[int, ...]
    num_key_slabs: int
    num_value_slabs: int

    @property
    def num_layers(self) -> int:
        return len(self.layers)
