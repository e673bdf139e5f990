"""How many slabs a tiered cache gets: enough wherever there are bytes enough."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cache.formats import COLD_FORMATS, Part
from engine.cache.tier_config import TierConfig
from engine.cache.tier_group import TierGroup
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import CacheTooSmall
from engine.execution.tiered_build import bytes_beside, plan_tiers
from engine.execution.tiered_skips import SkipsShape
from engine.models.model_config import ModelConfig
from engine.models.registry import find_architecture
from engine.models.rope import RopeParameters
from engine.ranks.group import SINGLE_RANK
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.tiered_space import TieredSpace, num_slabs_needed
from engine.sequence import Sequence
from engine.tiering import arena_groups

NUM_LAYERS = 2
MODEL = ModelConfig(
    architecture=find_architecture("LlamaForCausalLM"),
    vocab_size=199,
    hidden_size=128,
    intermediate_size=256,
    num_layers=NUM_LAYERS,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeParameters(),
    sliding_windows=(None,) * NUM_LAYERS,
    tie_embeddings=True,
    max_position_embeddings=1 << 20,
    dtype="bfloat16",
    eos_token_ids=(),
)
PLENTY = 1 << 40
LENGTHS = (1, 2, *range(50, 1300, 37), 63, 64, 65, 128, 191, 192, 575, 576, 577, 1024, 1025, 1026)


def config_of(tiers: TierConfig, max_num_sequences: int, kv_cache_bytes: int) -> EngineConfig:
    return EngineConfig(
        Path(),
        cache=CacheConfig(tiers=tiers, kv_cache_bytes=kv_cache_bytes),
        scheduler=SchedulerConfig(max_num_sequences, max_num_batched_tokens=4096),
    )


def planned(
    tiers: TierConfig, max_num_sequences: int, max_model_len: int, kv_cache_bytes: int = PLENTY
) -> TierGroup:
    config = config_of(tiers, max_num_sequences, kv_cache_bytes)
    layers_of = [(tuple(range(NUM_LAYERS)), tiers)]
    (group,) = plan_tiers(config, MODEL, layers_of, SINGLE_RANK, max_model_len)
    return group


@pytest.mark.parametrize("cold_format", COLD_FORMATS)
@pytest.mark.parametrize("sizes", [{}, {"sink_tokens": 0, "warm_tokens": 0}, {"cell_tokens": 1024}])
def test_a_context_that_is_short_is_no_reason_to_refuse(
    sizes: dict[str, int], cold_format: str
) -> None:
    tiers = replace(TierConfig(cold_format=cold_format), **sizes)
    for max_num_sequences in (1, 2, 4, 64):
        for max_model_len in LENGTHS:
            group = planned(tiers, max_num_sequences, max_model_len)
            for part, num_slabs in zip(
                Part, (group.num_key_slabs, group.num_value_slabs), strict=True
            ):
                needed = num_slabs_needed(tiers, part, max_model_len)
                assert num_slabs >= max_num_sequences * needed
                assert num_slabs % tiers.cold[part].num_slabs == 0


@pytest.mark.parametrize("cold_format", COLD_FORMATS)
@pytest.mark.parametrize("max_model_len", [40, 200, 576, 1025])
def test_as_many_run_at_once_as_may(max_model_len: int, cold_format: str) -> None:
    tiers = TierConfig(cold_format=cold_format)
    group = planned(tiers, 4, max_model_len)
    space = TieredSpace(arena_groups([group], b"", SINGLE_RANK), b"")
    scheduler = Scheduler(SchedulerConfig(4, 4 * max_model_len), space, max_model_len)
    num_tokens = max_model_len - 1
    for number in range(5):
        scheduler.add(
            Sequence(str(number), [number] * num_tokens, num_tokens, SamplingParams(max_tokens=1))
        )
    assert len(scheduler.schedule().scheduled) == 4


def test_bytes_that_are_too_few_are_the_reason() -> None:
    tiers = TierConfig()
    with pytest.raises(CacheTooSmall, match=r"needs 56 slabs of keys.*raise kv_cache_bytes"):
        planned(tiers, 1, 200, kv_cache_bytes=1 << 18)
    assert planned(tiers, 1, 200, kv_cache_bytes=1 << 20).num_key_slabs >= 56


@pytest.mark.parametrize("cold_format", COLD_FORMATS)
def test_what_decodes_skip_is_counted_only_where_they_do(cold_format: str) -> None:
    """For the format that takes most: which layers keep what is not known yet."""
    tiers = TierConfig(cold_format=cold_format)
    pages, skips = bytes_beside(config_of(tiers, 8, PLENTY), MODEL, torch.bfloat16, 4096)
    assert skips == 0
    skipping = replace(tiers, skip_epsilon=0.03)
    found = bytes_beside(config_of(skipping, 8, PLENTY), MODEL, torch.bfloat16, 4096)
    heads = MODEL.num_heads, MODEL.num_kv_heads
    own = SkipsShape.of(skipping, NUM_LAYERS, heads, 4096).num_bytes(8)
    assert found[0] == pages
    assert own <= found[1] < 1.25 * own
