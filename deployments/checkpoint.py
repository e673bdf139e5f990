"""What a checkpoint must contain, and the checks every weight passes on its way into the cache."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deployments.errors import ModelFilesError


def expected_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Parameter names and shapes of the model that `config` (a transformers config) describes.

    A tied output embedding is left out: the input embedding stands for it.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


def check_tensor(file: Path, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ModelFilesError naming file and tensor for a wrong shape or a NaN or Inf."""
    if tuple(tensor.shape) != shape:
        raise ModelFilesError(
            f"{file}: tensor {name}: expected shape {list(shape)}, found {list(tensor.shape)}"
        )
    if not tensor.is_floating_point():
        raise ModelFilesError(
            f"{file}: tensor {name} is {tensor.dtype}: quantised safetensors are not supported; "
            "use a bf16, fp16 or fp32 checkpoint, or a GGUF file"
        )
    num_bad = int((~torch.isfinite(tensor)).sum())
    if num_bad:
        raise ModelFilesError(f"{file}: tensor {name} holds {num_bad} NaN or Inf values")


def check_names(source: Path, found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raises ModelFilesError when a parameter is missing."""
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise ModelFilesError(
            f"{source}: {len(missing)} tensors are missing, first {missing[0]}; "
            "is the download complete?"
        )
