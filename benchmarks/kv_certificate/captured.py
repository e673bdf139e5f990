"""Attention of a real model over a real text: every layer's queries, keys and values, turned and
rotated as a tiered cache has them."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.errors import MeasurementFailed
from engine.models.decoder import build_decoder
from engine.models.model_config import ModelConfig
from engine.models.weights import load_weights
from kernels.rotary.api import rotary
from kernels.tiered_append.hadamard import rotated


@dataclass(frozen=True)
class Captured:
    """queries [layers, steps, num_heads, size] of the last tokens, keys and values [layers,
    num_kv_heads, num_tokens, size], bfloat16."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def prose() -> str:
    """Real text that every Python has."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@torch.inference_mode()
def capture(model: Path, num_tokens: int, num_steps: int, device: str) -> Captured:
    """Of a model folder. Raises MeasurementFailed."""
    from tokenizers import Tokenizer

    token_ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(prose()).ids
    if len(token_ids) < num_tokens:
        raise MeasurementFailed(f"the text has {len(token_ids)} tokens, {num_tokens} are needed")
    config = ModelConfig.from_folder(model)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    decoder = build_decoder(config, load_weights(model, config, dtype, device))
    found: list[tuple[torch.Tensor, ...]] = []

    def attend(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        query, key = rotary(query, cos, sin), rotary(key, cos, sin)
        queries, keys, values = (each.transpose(0, 1) for each in (query, key, value))
        kept = rotated(query[-num_steps:]), rotated(keys), rotated(values)
        found.append(tuple(each.bfloat16() for each in kept))
        attended = scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, enable_gqa=True
        )
        return attended[0].transpose(0, 1).contiguous()

    ids = torch.tensor(token_ids[:num_tokens], device=device)
    positions = torch.arange(num_tokens, device=device)
    decoder.forward(ids, positions, attend, rows=positions[-1:])
    return Captured(*(torch.stack(each).contiguous() for each in zip(*found, strict=True)))
