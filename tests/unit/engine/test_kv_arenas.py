"""How a budget of bytes becomes slabs, and how many tokens these hold, metadata counted."""

import pytest

from benchmarks.kv_arena.capacity import num_tokens_held
from engine.cache.formats import Part
from engine.cache.kv_arenas import KvArenas, LayerGroup, share_out
from engine.cache.tier_config import TierConfig

ONE_LAYER = LayerGroup(num_layers=1, num_kv_heads=8, head_dim=128)


def test_slab_bytes_follow_from_the_model() -> None:
    config = TierConfig(cold_format="int4")
    assert ONE_LAYER.slab_bytes(config) == 32 << 10
    assert LayerGroup(1, 4, 128).slab_bytes(config) == 16 << 10


@pytest.mark.parametrize(
    ("cold_format", "token_bytes"), [("int4", 140), ("k8v4", 204), ("int8", 268)]
)
def test_a_cold_block_and_its_metadata(cold_format: str, token_bytes: int) -> None:
    config = TierConfig(cold_format=cold_format)
    block_bytes = sum(ONE_LAYER.grain_bytes(config, part) for part in Part)
    assert block_bytes == token_bytes * 64 * 8


def test_exact_has_no_metadata() -> None:
    config = TierConfig(exact=True)
    assert sum(ONE_LAYER.grain_bytes(config, part) for part in Part) == 512 * 64 * 8


@pytest.mark.parametrize(
    ("config", "keys_to_values"),
    [
        (TierConfig(exact=True), 1.0),
        (TierConfig(cold_format="int4"), 1.0),
        (TierConfig(cold_format="int8"), 1.0),
        (TierConfig(cold_format="k8v4"), (12 + 16 + 2 * 1013) / (12 + 16 + 1013)),
    ],
)
def test_a_budget_is_shared_out_as_a_sequence_fills_it(
    config: TierConfig, keys_to_values: float
) -> None:
    budget = 1 << 34
    keys, values = share_out(budget, ONE_LAYER, config, 65_536)
    assert keys / values == pytest.approx(keys_to_values, rel=1e-3)
    used = KvArenas.create(keys, values, config).num_bytes(ONE_LAYER, config)
    assert 0.999 * budget < used <= budget


@pytest.mark.parametrize(("cold_format", "least"), [("int4", 3.4), ("k8v4", 2.4), ("int8", 1.8)])
def test_tokens_that_fit_at_64k(cold_format: str, least: float) -> None:
    in_bf16 = num_tokens_held(TierConfig(exact=True), 65_536, shared_out_for=65_536)
    config = TierConfig(cold_format=cold_format)
    held = num_tokens_held(config, 65_536, shared_out_for=65_536)
    assert held / in_bf16 >= least
