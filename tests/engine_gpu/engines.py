"""A small random Llama, and engines of it: on the device that is tested, and on a CPU in plain
PyTorch, which is what the others are held against."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.build import build_engine_around, build_model_runner
from engine.cache.tier_config import TierConfig
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.decode_graphs import DecodeGraphs, padded_sizes
from engine.execution.layer_graphs import LayerGraphs, layer_sizes
from engine.execution.model_runner import ModelRunner
from engine.execution.recorder import Results
from engine.execution.sequence_slots import SequenceSlots
from engine.execution.tiered_attention import TieredAttention
from engine.execution.triton_attention import TritonAttention

DEVICE = os.environ.get("FLASHRAY_TEST_DEVICE", "cuda:0")
IS_REHEARSAL = DEVICE == "cpu"
VOCAB_SIZE = 1024
BLOCK_SIZE = 64
SMALL_TIERS = TierConfig(hot_tokens=64, warm_tokens=64, cell_tokens=128)  # all within 400 tokens
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 8, 2, 64
MAX_MODEL_LEN = 4096
BLOCK_NUMBERS = 2 * NUM_LAYERS * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM
REFERENCE_THREADS = min(8, os.cpu_count() or 1)


def save_small_llama(folder: Path) -> None:
    """In float32; logits lie so far apart that rounding decides no token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=1024,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)


class Recompute:
    """Stands in for the recorder of CUDA graphs in a rehearsal."""

    def record(self, compute: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        results = compute()

        def replay() -> None:
            for kept, fresh in zip(results, compute(), strict=True):
                kept.copy_(fresh)

        return results, replay


def device_config(
    folder: Path,
    *,
    num_blocks: int = 1024,
    max_num_sequences: int = 8,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 1024,
    enable_prefix_cache: bool = True,
    tiers: TierConfig | None = None,
    **changes: Any,
) -> EngineConfig:
    """Our kernels on the device, one step ahead. `num_blocks` were there without `tiers`."""
    fields = {
        "device": DEVICE,
        "dtype": "float32",
        "attention_backend": "triton",
        "async_scheduling": True,
        "check_integrity": True,
        "num_threads": REFERENCE_THREADS,
        **changes,
    }
    itemsize = 4 if fields["dtype"] == "float32" else 2
    return EngineConfig(
        folder,
        max_model_len=max_model_len,
        cache=CacheConfig(
            kv_cache_bytes=num_blocks * BLOCK_NUMBERS * itemsize,
            enable_prefix_cache=enable_prefix_cache,
            tiers=tiers,
        ),
        scheduler=SchedulerConfig(max_num_sequences, max_num_batched_tokens),
        **fields,
    )


def reference_config(folder: Path, **changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch",
        "async_scheduling": False,
    }
    return device_config(folder, **fields, **changes)


def build(config: EngineConfig) -> tuple[Engine, ModelRunner]:
    runner = build_model_runner(config)
    if IS_REHEARSAL and config.async_scheduling and not config.enforce_eager:
        backend = runner._backend
        assert isinstance(backend, TritonAttention | TieredAttention)
        assert runner._slots is not None
        runner._graphs = DecodeGraphs(runner._decoder, backend, runner._slots, Recompute())
        for size in padded_sizes(config.scheduler.max_num_sequences):
            runner._graphs.record(size)
        if isinstance(backend, TieredAttention):
            return build_engine_around(runner, config), runner
        assert isinstance(runner._slots, SequenceSlots)
        shape = config.scheduler.max_num_sequences, runner._slots.block_tables.shape[1]
        runner._layer_graphs = LayerGraphs(runner._decoder, backend, Recompute(), shape)
        runner._layer_graphs.record(layer_sizes(config.scheduler.max_num_batched_tokens))
    return build_engine_around(runner, config), runner
