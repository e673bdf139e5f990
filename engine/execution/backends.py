"""Which attention an engine gets."""

import logging

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.execution.attention import ReferenceAttention
from engine.execution.flash_attention import VllmFlashAttention, find_flash_attention
from engine.execution.triton_attention import TritonAttention

BackendClass = type[TritonAttention] | type[ReferenceAttention]
ATTENTION_BACKENDS: dict[str, BackendClass] = {
    "triton": TritonAttention,
    "vllm_flash_attn": VllmFlashAttention,
    "torch": ReferenceAttention,
}
WORK = {
    "triton": "triton, all by our own kernels",
    "vllm_flash_attn": "vllm_flash_attn, prompts by FlashAttention 3, decodes and recorded short "
    "prompts by our own kernels",
    "torch": "torch, plain PyTorch",
}

logger = logging.getLogger(__name__)


def attention_backend(config: EngineConfig) -> BackendClass:
    """Raises EngineError."""
    name = config.attention_backend
    if name == "auto":
        name = _fastest(config)
        logger.info("attention_backend auto: %s", WORK[name])
    if name not in ATTENTION_BACKENDS:
        names = ", ".join(ATTENTION_BACKENDS)
        raise EngineError(
            f"attention_backend must be one of auto, {names}, got {name!r}; correct it"
        )
    return ATTENTION_BACKENDS[name]


def prompt_attention(config: EngineConfig) -> type[TritonAttention]:
    """In an engine whose tokens age: what prompts attend by, over pages. Raises EngineError."""
    if config.attention_backend == "auto" and not config.device.startswith("cuda"):
        return TritonAttention
    chosen = attention_backend(config)
    if not issubclass(chosen, TritonAttention):
        raise EngineError(
            f"attention_backend {config.attention_backend} knows no kv_tiers; leave it at auto, or "
            "choose triton"
        )
    return chosen


def _fastest(config: EngineConfig) -> str:
    if not config.device.startswith("cuda"):
        return "torch"
    return "triton" if find_flash_attention()[0] is None else "vllm_flash_attn"
