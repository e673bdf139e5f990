"""The decoder: embedding, layers, final norm, logits. Plain tensors, driven by ModelConfig."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.models.model_config import ModelConfig
from engine.models.rope import Rope, build_rope
from engine.models.weights import DecoderWeights, LayerWeights
from kernels.linear.api import linear
from kernels.rms_norm.api import rms_norm
from kernels.rotary.api import rotary
from kernels.silu_mul.api import silu_mul

# (layer index, query [num_tokens, num_heads, head_dim], key, value [num_tokens, num_kv_heads,
# head_dim]) -> attended [num_tokens, num_heads, head_dim]; stores key and value on the way.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Decoder:
    config: ModelConfig
    weights: DecoderWeights
    rope: Rope

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """input_ids, positions [num_tokens] int64 -> hidden [num_tokens, hidden_size]."""
        weights = self.weights
        cos, sin = self.rope.cos_sin(positions, weights.dtype)
        hidden = weights.embedding.index_select(0, input_ids)
        for index, layer in enumerate(weights.layers):
            query, key, value = self._project(layer, hidden, cos, sin)
            attended = attend(index, query, key, value)
            hidden += linear(attended.flatten(1), layer.output)
            hidden += self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_rows, vocab_size]."""
        normed = rms_norm(hidden, self.weights.final_norm, self.config.rms_norm_eps)
        return linear(normed, self.weights.lm_head).float()

    def _project(
        self, layer: LayerWeights, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, eps = self.config, self.config.rms_norm_eps
        qkv = linear(rms_norm(hidden, layer.input_norm, eps), layer.qkv)
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        turning = heads[:, : -config.num_kv_heads]  # queries and keys
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = turning.split((config.num_heads, config.num_kv_heads), dim=1)
            turning = torch.cat(
                (rms_norm(query, layer.q_norm, eps), rms_norm(key, layer.k_norm, eps)), dim=1
            )
        turned = rotary(turning, cos, sin)
        return (
            turned[:, : config.num_heads],
            turned[:, config.num_heads :],
            heads[:, -config.num_kv_heads :],
        )

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(hidden, layer.post_attention_norm, self.config.rms_norm_eps)
        return linear(silu_mul(linear(normed, layer.gate_up)), layer.down)


def build_decoder(config: ModelConfig, weights: DecoderWeights) -> Decoder:
    rope = build_rope(config.rope, config.head_dim)
    return Decoder(config, weights, Rope(rope.inverse_frequencies.to(weights.device), rope.scaling))
