"""The pools of a soak whose tokens age, in every cold format: small, and not too small."""

from pathlib import Path

import pytest

from benchmarks.soak.command import config_of, limits_of
from deployments.errors import ModelFilesError
from engine.cache.formats import COLD_FORMATS, Part
from engine.cache.tier_config import TierConfig
from engine.models.model_config import ModelConfig
from engine.ranks.group import SINGLE_RANK
from engine.scheduling.tiered_space import TieredSpace
from engine.tiering import arena_groups, layers_by_config, tier_groups


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("cold_format", COLD_FORMATS)
def test_the_pool_is_smaller_than_what_may_run(
    device: str, cold_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of full length have cold blocks; one of them can end, not half of what may run."""

    def missing(*_: object, **__: object) -> None:
        raise ModelFilesError("the built-in model is not installed")

    monkeypatch.setattr("benchmarks.soak.command.prepare_model", missing)
    limits = limits_of(device, cold_format)
    config = config_of(device, tmp_path, cold_format=cold_format)
    tiers, max_model_len = config.cache.tiers, limits.max_model_len
    assert tiers == TierConfig(cold_format=cold_format)
    model = ModelConfig.from_folder(config.model_path)
    layers_of = layers_by_config(config.cache, model.num_layers, "")
    (group,) = tier_groups(layers_of, model, config.cache.kv_cache_bytes, max_model_len)

    TieredSpace(arena_groups([group], b"", SINGLE_RANK), b"").require_capacity(max_model_len)

    ages = tiers.decode_ages(max_model_len - 1)
    assert ages.warm_start - ages.cold_start > 8
    num_slabs = tiers.num_slabs(ages, max_model_len, Part.KEYS)
    assert group.num_key_slabs < config.scheduler.max_num_sequences * num_slabs / 2
    assert limits.max_new_tokens > tiers.hot_tokens + tiers.warm_tokens
    assert config.check_integrity


def test_without_tiers_nothing_ages(tmp_path: Path) -> None:
    assert config_of("cuda:0", tmp_path).cache.tiers is None
