"""FlashAttention 3 as vLLM carries it, where that is installed."""

from typing import Any

import torch

from benchmarks.errors import MeasurementFailed


def flash_attn_varlen_func(**arguments: Any) -> torch.Tensor:
    """Raises MeasurementFailed."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func as attend
    except (ImportError, AttributeError) as exc:
        raise MeasurementFailed(f"vllm is there, but not its FlashAttention: {exc}") from exc
    attended: torch.Tensor = attend(**arguments)
    return attended
