"""No key of a model is longer than what its weights say, and that is not far from what some are."""

from pathlib import Path

import pytest
import torch

from engine.models.decoder import Decoder, build_decoder
from engine.models.key_lengths import key_lengths
from engine.models.model_config import ModelConfig
from engine.models.weights import load_weights
from kernels.tiered_append.reference import turned
from tests.unit.engine.tiny_checkpoint import save_tiny

VARIANTS = ("llama", "llama, yarn rope", "qwen2, qkv bias", "qwen3, qk norm")


def decoder_of(folder: Path, quantization: str | None = None) -> Decoder:
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, torch.float32, quantization=quantization)
    return build_decoder(config, weights)


@torch.inference_mode()
def longest_keys(decoder: Decoder) -> torch.Tensor:
    """[num_layers, num_kv_heads], of some tokens: as they are stored, in bf16."""
    found = torch.zeros(decoder.config.num_layers, decoder.config.num_kv_heads)

    def attend(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
        query, key, _, cos, sin = tensors
        found[layer] = turned(key, cos, sin).bfloat16().float().norm(dim=-1).amax(0)
        return query

    tokens = torch.arange(decoder.config.vocab_size)
    decoder.forward(tokens, tokens, attend)
    return found


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_are_no_longer(variant: str, quantization: str | None, tmp_path: Path) -> None:
    save_tiny(tmp_path, variant)
    decoder = decoder_of(tmp_path, quantization)
    lengths, longest = key_lengths(decoder), longest_keys(decoder)
    assert lengths.shape == longest.shape
    assert (longest <= lengths).all()
    assert (lengths <= 6 * longest).all()
