"""What an engine is told at start. Frozen; derived values are properties."""

from dataclasses import dataclass, field
from pathlib import Path

from engine.cache.formats import BLOCK_SIZE
from engine.cache.tier_config import TierConfig


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool. `kv_cache_bytes` covers keys and values of all layers of this rank; None, on a
    GPU: all that is left within `gpu_memory_utilization` of its memory after the largest step.
    `tiers`: how tokens age; None: none does, all stay in the dtype of the model. `calibration`: a
    file that says which layers keep what cold format, in the place of that of `tiers`."""

    kv_cache_bytes: int | None = 1 << 30
    block_size: int = BLOCK_SIZE
    enable_prefix_cache: bool = True
    gpu_memory_utilization: float = 0.9
    tiers: TierConfig | None = None
    calibration: Path | None = None


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_num_batched_tokens` bounds the tokens of one step, decode and prefill together.

    `itl_budget_ms` bounds the predicted time of a step with decodes in it, by smaller prefill
    chunks; the oldest prefill still gets a block a step. None: the tokens are the only bound.
    """

    max_num_sequences: int = 64
    max_num_batched_tokens: int = 256
    itl_budget_ms: float | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`dtype` "auto" takes the checkpoint's; on CPU that becomes float32 (exact, and as fast).

    `max_model_len` None takes the checkpoint's context length. `attention_backend`: "triton" for
    the kernels (on a CPU tensor: their references), "vllm_flash_attn" for prompts by FlashAttention
    3, "torch" for plain PyTorch, "auto" for the fastest of them that is there.

    `deterministic`: on a GPU, and with tiers on a CPU, a sequence's tokens do not depend, to the
    bit, on what runs beside it or on how its prompt was cut: by our own kernels alone, which costs
    speed.
    `quantization` "fp8": the matrices of the layers in 8-bit floats, half the bytes, at some loss;
    not with `deterministic`.
    `async_scheduling`: plan a step while the last one computes; None where that gains, on one GPU.
    `enforce_eager`: no CUDA graphs. `load_format` "dummy": small random weights, of which only
    config.json is read: to measure speed.
    """

    model_path: Path
    device: str = "cpu"
    dtype: str = "auto"
    attention_backend: str = "auto"
    deterministic: bool = False
    quantization: str | None = None
    load_format: str = "auto"
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    max_model_len: int | None = None
    num_threads: int = 1
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    check_integrity: bool = False  # after every step; tests turn it on
