"""A Hugging Face folder's config.json, read once into the few values the decoder needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.registry import Architecture, WindowRule, find_architecture
from engine.models.rope import ROPE_TYPES, RopeParameters

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`sliding_windows` has one entry a layer: the number of keys a query sees, None for all."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    sliding_windows: tuple[int | None, ...]
    tie_embeddings: bool
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Raises UnsupportedModel, and CheckpointError when config.json cannot be read."""
        written = _read_json(folder / "config.json")
        names = written.get("architectures") or ["(none named)"]
        architecture = find_architecture(names[0])
        _refuse_quantization(written)
        source = _auto_config(folder)
        _refuse_variants(source)
        return cls(
            architecture=architecture,
            vocab_size=source.vocab_size,
            hidden_size=source.hidden_size,
            intermediate_size=source.intermediate_size,
            num_layers=source.num_hidden_layers,
            num_heads=source.num_attention_heads,
            num_kv_heads=source.num_key_value_heads,
            head_dim=_head_dim(source),
            rms_norm_eps=source.rms_norm_eps,
            rope=_rope(source),
            sliding_windows=_sliding_windows(source, architecture.window_rule),
            tie_embeddings=source.tie_word_embeddings,
            max_position_embeddings=source.max_position_embeddings,
            dtype=_dtype(source),
            eos_token_ids=_eos_token_ids(folder, source),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise CheckpointError(
            f"{path} not found; model_path must be a Hugging Face folder with a config.json"
        ) from exc
    except ValueError as exc:
        raise CheckpointError(f"{path} is not JSON ({exc}); download the file again") from exc
    if not isinstance(written, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(written).__name__}")
    return written


def _auto_config(folder: Path) -> Any:
    from transformers import AutoConfig  # 2.5 s to import: only where a model is loaded

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as exc:  # transformers' validators raise classes of their own
        raise UnsupportedModel(
            f"transformers cannot read {folder / 'config.json'}: {exc}; correct the file"
        ) from exc


def _refuse_quantization(written: dict[str, Any]) -> None:
    quantization = written.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown method")
        raise UnsupportedModel(
            f"quantization_config ({method}) is not supported; use the unquantized checkpoint"
        )


def _refuse_variants(source: Any) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if getattr(source, name, False):
            raise UnsupportedModel(f"{name}=true is not supported; use a checkpoint without it")
    if source.hidden_act != "silu":
        raise UnsupportedModel(
            f"hidden_act {source.hidden_act!r} is not supported, only 'silu'; use another model"
        )


def _head_dim(source: Any) -> int:
    head_dim = getattr(source, "head_dim", None)
    if head_dim is None:
        head_dim = source.hidden_size // source.num_attention_heads
    if head_dim % 2 or source.num_attention_heads % source.num_key_value_heads:
        raise UnsupportedModel(
            "head_dim must be even and num_attention_heads a multiple of num_key_value_heads, got "
            f"{head_dim}, {source.num_attention_heads} and {source.num_key_value_heads}; "
            "correct config.json"
        )
    return int(head_dim)


def _rope(source: Any) -> RopeParameters:
    written = source.rope_parameters or {}
    rope_type = written.get("rope_type")
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(
            f"rope type {rope_type!r} is not supported; "
            f"use a checkpoint with one of {', '.join(ROPE_TYPES)}"
        )
    if written.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
    original = written.get("original_max_position_embeddings") or source.max_position_embeddings
    factor = written.get("factor") or source.max_position_embeddings / original
    return RopeParameters(
        rope_type=rope_type,
        theta=written["rope_theta"],
        factor=factor,
        original_context_len=original,
        low_freq_factor=written.get("low_freq_factor") or 1.0,
        high_freq_factor=written.get("high_freq_factor") or 4.0,
        attention_factor=written.get("attention_factor"),
        beta_fast=written.get("beta_fast") or 32.0,
        beta_slow=written.get("beta_slow") or 1.0,
        mscale=written.get("mscale") or 0.0,
        mscale_all_dim=written.get("mscale_all_dim") or 0.0,
        truncate=written.get("truncate", True),
    )


def _sliding_windows(source: Any, rule: WindowRule) -> tuple[int | None, ...]:
    window = getattr(source, "sliding_window", None)
    num_layers = int(source.num_hidden_layers)
    if rule is WindowRule.NONE or window is None:
        return (None,) * num_layers
    if rule is WindowRule.EVERY_LAYER:
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in source.layer_types)


def _dtype(source: Any) -> str:
    name = str(source.dtype or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(
            f"checkpoint dtype {name!r} is not supported; use one of {', '.join(DTYPES)}"
        )
    return name


def _eos_token_ids(folder: Path, source: Any) -> tuple[int, ...]:
    """generation_config.json wins: chat models name their end-of-turn token only there."""
    path = folder / "generation_config.json"
    written = _read_json(path).get("eos_token_id") if path.exists() else None
    eos = source.eos_token_id if written is None else written
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)
