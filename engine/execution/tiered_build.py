"""EngineConfig -> a cache whose tokens age and attention over it. What cannot be is refused."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.cache.formats import BLOCK_SIZE, Part
from engine.cache.tier_config import TierConfig
from engine.cache.tier_group import TierGroup
from engine.cache.tiers import ColdTier
from engine.config import EngineConfig, SchedulerConfig
from engine.errors import EngineError, UnsupportedModel
from engine.execution.kv_tensors import KVTensors, block_bytes
from engine.execution.skipping_decodes import SkippingDecodes
from engine.execution.tiered_attention import TieredAttention
from engine.execution.tiered_kv import TieredKV
from engine.execution.tiered_pages import num_pages_for
from engine.execution.tiered_skips import SkipsShape
from engine.execution.triton_attention import TritonAttention
from engine.models.decoder import Decoder
from engine.models.key_lengths import key_lengths
from engine.models.model_config import ModelConfig
from engine.ranks.group import Ranks
from engine.scheduling.tiered_space import TieredSpace, num_slabs_needed
from engine.tiering import arena_groups, tier_groups
from kernels.tiered_decode.reference import ROWS, SIZES
from kernels.tiered_skip import reference as tiered_skip

LayersOf = Sequence[tuple[tuple[int, ...], TierConfig]]

GPU_DTYPE = torch.bfloat16
WITHOUT = "leave kv_tiers out"
WITHOUT_SKIPPING = "leave skip_epsilon out"
STILL_HELD = 2  # what a step in flight may read is not free yet


def refuse_tiers(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    ranks: Ranks,
    cold_tier: ColdTier | None,
) -> None:
    """Raises UnsupportedModel, or EngineError, for what a tiered cache is not made for."""
    tiers = config.cache.tiers
    assert tiers is not None
    if ranks.size > 1:
        raise EngineError(f"kv_tiers need one rank, this engine has {ranks.size}; {WITHOUT}")
    if cold_tier is not None:
        raise EngineError(f"a cold tier takes blocks of one size, not of kv_tiers; {WITHOUT}")
    if tiers.exact:
        raise EngineError(f"kv_tiers that are exact are no tiers; {WITHOUT}: all stays exact then")
    for name, block_size in (
        ("block_size", config.cache.block_size),
        ("kv_tiers", tiers.block_size),
    ):
        if block_size != BLOCK_SIZE:
            raise EngineError(f"{name} must have blocks of {BLOCK_SIZE} tokens, got {block_size}")
    if config.device.startswith("cuda") and dtype != GPU_DTYPE:
        raise EngineError(
            f"kv_tiers compute in bfloat16 on a GPU, dtype is {dtype}; set dtype to bfloat16"
        )
    _refuse_model(model)
    if tiers.skip_epsilon:
        _refuse_skipping(config, model)


def _refuse_skipping(config: EngineConfig, model: ModelConfig) -> None:
    if config.deterministic:
        raise EngineError(
            "skip_epsilon is not deterministic: what a step leaves out depends on whether others "
            f"came with prompts in the step before; {WITHOUT_SKIPPING}, or deterministic"
        )
    if model.head_dim not in tiered_skip.SIZES:
        sizes = " or ".join(map(str, tiered_skip.SIZES))
        raise UnsupportedModel(
            f"skip_epsilon needs a head_dim of {sizes}, this model's is {model.head_dim}; "
            f"{WITHOUT_SKIPPING}"
        )


def _refuse_model(model: ModelConfig) -> None:
    if any(window is not None for window in model.sliding_windows):
        raise UnsupportedModel(f"kv_tiers know no sliding windows, this model has them; {WITHOUT}")
    if model.head_dim not in SIZES:
        sizes = " or ".join(map(str, SIZES))
        raise UnsupportedModel(
            f"kv_tiers need a head_dim of {sizes}, this model's is {model.head_dim}; {WITHOUT}"
        )
    group, most = model.num_heads // model.num_kv_heads, ROWS[-1]
    if group > most:
        raise UnsupportedModel(
            f"kv_tiers need at most {most} heads a KV head, this model has {group}; {WITHOUT}"
        )


def plan_tiers(
    config: EngineConfig, local: ModelConfig, layers_of: LayersOf, ranks: Ranks, max_model_len: int
) -> tuple[TierGroup, ...]:
    """As many slabs as `kv_cache_bytes` hold, but no more than all sequences of full length could
    use, or may claim where that is more. Raises CacheTooSmall where one could not end."""
    assert config.cache.kv_cache_bytes is not None, "measured by now"
    fitting = tier_groups(layers_of, local, config.cache.kv_cache_bytes, max_model_len)
    groups = tuple(_capped(group, config.scheduler, max_model_len) for group in fitting)
    TieredSpace(arena_groups(groups, b"", ranks), b"").require_capacity(max_model_len)
    return groups


def _capped(group: TierGroup, limits: SchedulerConfig, max_model_len: int) -> TierGroup:
    last, tiers = max_model_len - 1, group.config

    def most(part: Part) -> int:
        ages = (tiers.prefill_ages(last), tiers.decode_ages(last))
        of_one = max(tiers.num_slabs(each, max_model_len, part) for each in ages)
        claimed = num_slabs_needed(tiers, part, max_model_len)
        return limits.max_num_sequences * max(STILL_HELD * of_one, claimed)

    return replace(
        group,
        num_key_slabs=min(group.num_key_slabs, most(Part.KEYS)),
        num_value_slabs=min(group.num_value_slabs, most(Part.VALUES)),
    )


def bytes_beside(
    config: EngineConfig, local: ModelConfig, dtype: torch.dtype, max_model_len: int
) -> tuple[int, int]:
    """What comes beside `kv_cache_bytes`: the pages that prompts attend over, and at most what
    decodes keep of what they skip."""
    one_layer, tiers = replace(local, num_layers=1), config.cache.tiers
    pages = _num_pages(config, max_model_len) * block_bytes(one_layer, BLOCK_SIZE, dtype)
    if tiers is None or not tiers.skip_epsilon:
        return pages, 0
    widest, heads = replace(tiers, cold_format="int8"), (local.num_heads, local.num_kv_heads)
    shape = SkipsShape.of(widest, local.num_layers, heads, max_model_len)
    return pages, shape.num_bytes(config.scheduler.max_num_sequences)


def build_tiers(
    config: EngineConfig,
    decoder: Decoder,
    groups: Sequence[TierGroup],
    prompts: type[TritonAttention],
    max_model_len: int,
) -> tuple[TieredKV, TieredAttention]:
    """prompts: by which prompts attend over their pages."""
    local, weights = decoder.config, decoder.weights
    num_pages, scale = _num_pages(config, max_model_len), local.head_dim**-0.5
    kv = TieredKV.allocate(groups, local.num_kv_heads, local.head_dim, weights.device)
    one_layer = replace(local, num_layers=1)
    pages = KVTensors.allocate(one_layer, num_pages, BLOCK_SIZE, weights.dtype, weights.device)
    over_pages = prompts(pages, [None], scale, deterministic=config.deterministic)
    backend = TieredAttention(
        kv,
        pages,
        over_pages,
        local.num_heads,
        scale,
        deterministic=config.deterministic,
        skipping=_skipping(config, decoder, kv, max_model_len),
    )
    return kv, backend


def _skipping(
    config: EngineConfig, decoder: Decoder, kv: TieredKV, max_model_len: int
) -> SkippingDecodes | None:
    if not kv.groups[0].config.skip_epsilon:
        return None
    local, most = decoder.config, config.scheduler.max_num_sequences
    scale, lengths = local.head_dim**-0.5, key_lengths(decoder)
    return SkippingDecodes(kv, local.num_heads, scale, lengths, most, max_model_len)


def _num_pages(config: EngineConfig, max_model_len: int) -> int:
    assert config.cache.tiers is not None
    most_tokens = config.scheduler.max_num_batched_tokens
    return num_pages_for(config.cache.tiers, max_model_len, most_tokens)
