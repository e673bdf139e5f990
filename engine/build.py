"""EngineConfig -> a rank's runner with its weights, and the engine around it."""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.cache.block_allocator import BlockAllocator
from engine.cache.spill import Restores
from engine.cache.tier_group import TierGroup
from engine.cache.tiers import ColdTier
from engine.config import EngineConfig
from engine.engine import Engine, Executor
from engine.errors import CacheTooSmall, CheckpointError, EngineError
from engine.execution.attention import AttentionBackend
from engine.execution.backends import BackendClass, attention_backend, prompt_attention
from engine.execution.decode_graphs import DecodeGraphs, padded_sizes
from engine.execution.kv_tensors import KVTensors, block_bytes, num_blocks_for
from engine.execution.layer_graphs import LayerGraphs, layer_sizes
from engine.execution.memory import profile_memory
from engine.execution.model_runner import ModelRunner
from engine.execution.recorder import GraphRecorder
from engine.execution.sampler import Sampler
from engine.execution.sequence_slots import SequenceSlots, Slots
from engine.execution.tiered_attention import TieredAttention
from engine.execution.tiered_build import build_tiers, bytes_beside, plan_tiers, refuse_tiers
from engine.execution.tiered_kv import TieredKV
from engine.execution.tiered_slots import TieredSlots
from engine.execution.triton_attention import TritonAttention
from engine.grammar import GrammarCompiler
from engine.models.decoder import Decoder, build_decoder
from engine.models.model_config import ModelConfig
from engine.models.quantization import refuse_quantization
from engine.models.shard import shard_of
from engine.models.weights import (
    DecoderWeights,
    dummy_weights,
    find_weight_files,
    load_weights,
    resolve_dtype,
)
from engine.ranks.follower import FollowerLoop
from engine.ranks.group import SINGLE_RANK, Ranks
from engine.ranks.leader import LeadingExecutor
from engine.ranks.plan import max_plan_bytes
from engine.ranks.plan_ring import PlanReader, PlanRing, ring_capacity
from engine.scheduling.cost_model import CostModel
from engine.scheduling.kv_space import KvSpace
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.tiered_space import TieredSpace
from engine.start_up import StartUp
from engine.step_profile import paged_steps, profile_steps, tiered_steps
from engine.tiering import arena_groups, layers_by_config
from kernels.linear.choose import choose_linears

DUMMY = "dummy"
LOAD_FORMATS = ("auto", DUMMY)
CACHE_LAYOUT_VERSION = 1  # counts up when the same tokens get different bytes in a block
_NUM_SAMPLED_PAGES, _PAGE_BYTES = 64, 4096

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    cold_tier: ColdTier | None = None,
    grammars: GrammarCompiler | None = None,
) -> Engine:
    """An engine of one rank; without `grammars` it refuses what asks for one. Loads the weights:
    seconds. Raises UnsupportedModel, CheckpointError, CacheTooSmall, EngineError."""
    runner = build_model_runner(config, cold_tier=cold_tier)
    return build_engine_around(runner, config, grammars=grammars)


def build_engine_around(
    runner: ModelRunner,
    config: EngineConfig,
    ranks: Ranks = SINGLE_RANK,
    grammars: GrammarCompiler | None = None,
) -> Engine:
    """The engine over a runner of `build_model_runner`, made of the same arguments."""
    return _engine_over(runner, runner, config, ranks, grammars)


def build_leader(
    runner: ModelRunner,
    config: EngineConfig,
    ranks: Ranks,
    ring: PlanRing,
    grammars: GrammarCompiler | None = None,
) -> Engine:
    """Rank 0 of several: its plans go to the others through `ring`. It alone samples, so it alone
    knows grammars."""
    return _engine_over(LeadingExecutor(runner, ring, ranks.size), runner, config, ranks, grammars)


def build_follower(runner: ModelRunner, plans: PlanReader) -> FollowerLoop:
    """Any other rank."""
    return FollowerLoop(runner, plans)


def open_ring(config: EngineConfig, num_ranks: int) -> PlanRing:
    """For the plans of this engine. Raises what reading config.json raises."""
    max_model_len = resolve_max_model_len(config, ModelConfig.from_folder(config.model_path))
    num_blocks = -(-max_model_len // config.cache.block_size) + 1
    limits = config.scheduler
    largest = max_plan_bytes(limits.max_num_sequences, limits.max_num_batched_tokens, num_blocks)
    return PlanRing(num_ranks - 1, ring_capacity(largest))


def build_model_runner(
    config: EngineConfig, ranks: Ranks = SINGLE_RANK, cold_tier: ColdTier | None = None
) -> ModelRunner:
    """Sets torch's thread count, process-wide. Every rank must be built at the same time, each
    with its own client of the cold tier or all without. Raises what `build_engine` raises, and
    RankLost."""
    if cold_tier is not None and not config.cache.enable_prefix_cache:
        raise EngineError(
            "a cold tier keeps blocks of the prefix cache, which is off; "
            "turn on enable_prefix_cache or leave the cold tier out"
        )
    is_tiered = config.cache.tiers is not None
    attention = prompt_attention(config) if is_tiered else attention_backend(config)
    torch.set_num_threads(config.num_threads)
    model = ModelConfig.from_folder(config.model_path)
    local = shard_of(model, ranks).local
    dtype = resolve_dtype(config.dtype, model.dtype, config.device)
    refuse_quantization(
        config.quantization, dtype, config.device, deterministic=config.deterministic
    )
    if is_tiered:
        refuse_tiers(config, model, dtype, ranks, cold_tier)
    is_on_gpu = config.device.startswith("cuda")
    is_measured = config.cache.kv_cache_bytes is None
    if is_measured and not is_on_gpu:
        raise EngineError("kv_cache_bytes None needs a GPU; say how many bytes")
    _refuse_small_cache(config, local, dtype, ranks)  # before the weights: in milliseconds
    start = StartUp()
    with start.phase("weights"):
        weights = _weights(config, model, dtype, ranks)
    decoder = build_decoder(model, weights, ranks, is_deterministic=config.deterministic)
    if is_on_gpu and not config.deterministic:
        with start.phase("choice of linear kernels"):
            choose_linears(weights.linears, weights.gate_ups)
    if is_measured:
        with start.phase("memory profile"):
            max_model_len = resolve_max_model_len(config, model)
            beside = bytes_beside(config, local, dtype, max_model_len) if is_tiered else ()
            kv_cache_bytes = profile_memory(config, decoder, *beside).kv_cache
        config = replace(config, cache=replace(config.cache, kv_cache_bytes=kv_cache_bytes))
        _refuse_small_cache(config, local, dtype, ranks)
    with start.phase("KV cache"):
        kv, backend = _kv_cache(config, local, attention, decoder)
    slots = _slots(config, model, ranks, kv)
    with start.phase("CUDA graphs"):
        graphs, layer_graphs = _graphs(config, decoder, backend, slots)
    logger.info("%s; %s", start.report(), kv)
    return ModelRunner(decoder, kv, backend, Sampler(), cold_tier, slots, graphs, layer_graphs)


def _weights(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, ranks: Ranks
) -> DecoderWeights:
    if config.load_format not in LOAD_FORMATS:
        raise EngineError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {config.load_format!r}"
        )
    settings = (model, dtype, config.device, ranks, config.quantization)
    is_tiered = config.cache.tiers is not None
    if config.load_format == DUMMY:
        return dummy_weights(*settings, rotate_values=is_tiered)
    return load_weights(config.model_path, *settings, rotate_values=is_tiered)


def _kv_cache(
    config: EngineConfig,
    local: ModelConfig,
    attention: BackendClass,
    decoder: Decoder,
) -> tuple[KVTensors | TieredKV, AttentionBackend]:
    dtype, device, ranks = decoder.weights.dtype, decoder.weights.device, decoder.ranks
    if config.cache.tiers is not None:
        assert issubclass(attention, TritonAttention), attention
        groups, max_model_len = _tiers(config, local, ranks), resolve_max_model_len(config, local)
        return build_tiers(config, decoder, groups, attention, max_model_len)
    num_blocks = ranks.minimum(_num_blocks(config, local, dtype))
    kv = KVTensors.allocate(local, num_blocks, config.cache.block_size, dtype, device)
    scale, windows = local.head_dim**-0.5, local.sliding_windows
    return kv, attention(kv, windows, scale, deterministic=config.deterministic)


def _tiers(config: EngineConfig, local: ModelConfig, ranks: Ranks) -> tuple[TierGroup, ...]:
    layers_of = layers_by_config(config.cache, local.num_layers, _weights_sha(config))
    return plan_tiers(config, local, layers_of, ranks, resolve_max_model_len(config, local))


def _slots(
    config: EngineConfig, model: ModelConfig, ranks: Ranks, kv: KVTensors | TieredKV
) -> Slots | None:
    if not _is_asynchronous(config, ranks):
        return None
    num_slots, max_model_len = (
        config.scheduler.max_num_sequences,
        resolve_max_model_len(config, model),
    )
    if isinstance(kv, TieredKV):
        configs = [group.config for group in kv.groups]
        return TieredSlots(num_slots, configs, max_model_len, kv.device)
    return SequenceSlots(num_slots, -(-max_model_len // kv.block_size), kv.device)


def _is_asynchronous(config: EngineConfig, ranks: Ranks) -> bool:
    """Raises EngineError."""
    if config.async_scheduling and ranks.size > 1:
        raise EngineError(
            f"async_scheduling needs one rank, this engine has {ranks.size}; leave it out"
        )
    if config.async_scheduling is None:
        return config.device.startswith("cuda") and ranks.size == 1
    return config.async_scheduling


def _graphs(
    config: EngineConfig,
    decoder: Decoder,
    backend: AttentionBackend,
    slots: Slots | None,
) -> tuple[DecodeGraphs | None, LayerGraphs | None]:
    if config.enforce_eager or slots is None or not config.device.startswith("cuda"):
        return None, None
    if not isinstance(backend, TritonAttention | TieredAttention):
        return None, None
    recorder = GraphRecorder()
    graphs = DecodeGraphs(decoder, backend, slots, recorder)
    for size in padded_sizes(config.scheduler.max_num_sequences):
        graphs.record(size)
    if isinstance(slots, TieredSlots):
        tables = [each for group in slots.tables for each in group]
    else:
        assert isinstance(slots, SequenceSlots), slots
        tables = [slots.block_tables]
    widths = [each.shape[1] for each in tables]
    tables_shape = config.scheduler.max_num_sequences, *widths
    layer_graphs = LayerGraphs(decoder, backend, recorder, tables_shape)
    layer_graphs.record(layer_sizes(config.scheduler.max_num_batched_tokens))
    return graphs, layer_graphs


def _engine_over(
    executor: Executor,
    runner: ModelRunner,
    config: EngineConfig,
    ranks: Ranks,
    grammars: GrammarCompiler | None,
) -> Engine:
    scheduler = Scheduler(
        config.scheduler,
        _space(config, runner, ranks),
        resolve_max_model_len(config, runner.model_config),
        _costs(config, runner),
    )
    return Engine(
        scheduler,
        executor,
        vocab_size=runner.model_config.vocab_size,
        launch=runner.launch if runner.is_asynchronous else None,
        grammars=grammars,
        check_integrity=config.check_integrity,
        skipped=lambda: runner.skipped,
    )


def _space(config: EngineConfig, runner: ModelRunner, ranks: Ranks) -> KvSpace:
    address = cache_address(config, runner.model_config, ranks)
    if runner.tier_groups:
        return TieredSpace(
            arena_groups(runner.tier_groups, address, ranks),
            address,
            enable_prefix_cache=config.cache.enable_prefix_cache,
            replays_decodes=config.deterministic,
        )
    return PagedSpace(
        BlockAllocator(runner.num_blocks, runner.block_size, config.cache.enable_prefix_cache),
        address,
        None if runner.cold_tier is None else Restores(runner.cold_tier),
    )


def _costs(config: EngineConfig, runner: ModelRunner) -> CostModel | None:
    """Measured where the time of a step is bounded and the device keeps its own pace."""
    is_on_gpu = config.device.startswith("cuda") and runner.is_asynchronous
    if config.scheduler.itl_budget_ms is None or not is_on_gpu:
        return None
    max_context = resolve_max_model_len(config, runner.model_config) - 1
    if runner.tier_groups:
        plan = tiered_steps(arena_groups(runner.tier_groups, b"", SINGLE_RANK))
    else:
        max_context = min(max_context, runner.num_blocks * runner.block_size)
        plan = paged_steps(runner.block_size)
    costs = CostModel(profile_steps(runner, config.scheduler, max_context, plan))
    runner.count_skipped_anew()
    return costs


def resolve_max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Raises EngineError beyond the checkpoint's context: positions there were never trained."""
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if not 1 <= config.max_model_len <= limit:
        raise EngineError(
            f"max_model_len must be in [1, {limit}], the checkpoint's context, "
            f"got {config.max_model_len}; lower it, or extend the context in config.json"
        )
    return config.max_model_len


def cache_address(config: EngineConfig, model: ModelConfig, ranks: Ranks = SINGLE_RANK) -> bytes:
    """What the bytes of a cached block depend on besides its tokens, as 32 bytes."""
    dtype = resolve_dtype(config.dtype, model.dtype, config.device)
    parts = (
        _weights_sha(config),
        str(dtype) if config.quantization is None else f"{dtype} {config.quantization}",
        str(config.cache.block_size),
        str(CACHE_LAYOUT_VERSION),
        f"rank {ranks.rank} of {ranks.size}",
    )
    return hashlib.sha256("\0".join(parts).encode()).digest()


def _weights_sha(config: EngineConfig) -> str:
    return DUMMY if config.load_format == DUMMY else weights_sha256(config.model_path)


def weights_sha256(folder: Path) -> str:
    """The `sha256` recorded in the folder's flashray.json, else a fingerprint of the weight files:
    names, sizes, headers and pages spread over the tensors (reading a whole 16 GB takes minutes).
    """
    recorded = folder / "flashray.json"
    if recorded.exists():
        try:
            digest = json.loads(recorded.read_text(encoding="utf-8")).get("sha256")
        except (ValueError, AttributeError) as exc:
            raise CheckpointError(f"{recorded} must hold a JSON object; convert again") from exc
        if isinstance(digest, str):
            return digest
    return _fingerprint((*find_weight_files(folder), folder / "config.json"))


def _fingerprint(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        num_bytes = path.stat().st_size
        digest.update(f"{path.name}\0{num_bytes}\0".encode())
        with path.open("rb") as file:
            header_bytes = 8 + int.from_bytes(file.read(8), "little")  # safetensors' own length
            file.seek(0)
            digest.update(file.read(min(header_bytes, num_bytes)))
            for page in range(_NUM_SAMPLED_PAGES):
                file.seek(num_bytes * page // _NUM_SAMPLED_PAGES)
                digest.update(file.read(_PAGE_BYTES))
    return digest.hexdigest()


def _num_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """As many as the bytes hold, but no more than all sequences of full length could use."""
    assert config.cache.kv_cache_bytes is not None, "measured by now"
    fitting = num_blocks_for(config.cache.kv_cache_bytes, model, config.cache.block_size, dtype)
    return min(fitting, _blocks_a_sequence(config, model) * config.scheduler.max_num_sequences)


def _refuse_small_cache(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, ranks: Ranks
) -> None:
    """Raises CacheTooSmall; nothing while the bytes are not known."""
    if config.cache.tiers is not None:
        if config.cache.kv_cache_bytes is not None:
            _tiers(config, model, ranks)
        return
    num_bytes, block_size = config.cache.kv_cache_bytes, config.cache.block_size
    needed = _blocks_a_sequence(config, model)
    if num_bytes is not None and num_blocks_for(num_bytes, model, block_size, dtype) < needed:
        raise CacheTooSmall(
            f"a sequence of max_model_len {resolve_max_model_len(config, model)} needs "
            f"{needed * block_bytes(model, block_size, dtype)} bytes of KV cache, "
            f"kv_cache_bytes is {num_bytes}; raise it or lower max_model_len"
        )


def _blocks_a_sequence(config: EngineConfig, model: ModelConfig) -> int:
    """One more than it fills: the scheduler keeps a spare block to grow into."""
    return -(-resolve_max_model_len(config, model) // config.cache.block_size) + 1
