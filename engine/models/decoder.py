"""The decoder: embedding, layers, final norm, logits. Plain tensors, driven by ModelConfig.

A rank computes its own heads, its own part of the MLP and of the vocabulary; what flows between
layers is whole on every rank.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.models.model_config import ModelConfig
from engine.models.quantization import Linear
from engine.models.rope import Rope, build_rope
from engine.models.shard import Span, shard_of
from engine.models.weights import DecoderWeights, LayerWeights
from engine.ranks.group import SINGLE_RANK, Ranks
from kernels.fp8_linear.api import Fp8Linear, fp8_linear
from kernels.linear.api import linear, linear_silu_mul
from kernels.rms_norm.api import rms_norm
from kernels.silu_mul.api import silu_mul


class Attend(Protocol):
    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim], key, value [num_tokens, num_kv_heads, head_dim],
        cos, sin [num_tokens, 1, head_dim] -> like query. Turns query and key by cos and sin, and
        stores key and value before it attends."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """`config` counts the heads of this rank. `is_deterministic`: a row's numbers do not depend on
    the other rows of the step, nor on how many there are."""

    config: ModelConfig
    weights: DecoderWeights
    rope: Rope
    ranks: Ranks
    vocabulary: Span
    is_deterministic: bool = False

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids, positions [num_tokens] int64 -> [num_rows, hidden_size], after the last norm:
        of the tokens `rows` [num_rows] int64, None for all."""
        weights, eps = self.weights, self.config.rms_norm_eps
        cos, sin = self.rope.cos_sin(positions, weights.dtype)
        embedded = self._embed(input_ids)
        normed = rms_norm(embedded, weights.layers[0].input_norm, eps)
        residual = embedded.float()
        next_norms = (*[layer.input_norm for layer in weights.layers[1:]], weights.final_norm)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            attended = attend(index, *self._project(layer, normed), cos, sin).flatten(1)
            if rows is not None and layer is weights.layers[-1]:
                # From here on no token is looked at by another: the others are done.
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
            update = self.ranks.all_reduce(self._linear(attended, layer.output))
            normed = rms_norm(update, layer.post_attention_norm, eps, residual)
            update = self.ranks.all_reduce(self._mlp(layer, normed))
            normed = rms_norm(update, next_norm, eps, residual)
        return normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Rows of what `forward` gives -> float32 [num_rows, vocab_size] on rank 0, on the others
        the columns of their own part of the vocabulary."""
        columns = self.ranks.gather_columns(self._linear(normed, self.weights.lm_head))
        return columns[:, : self.config.vocab_size].contiguous()

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.vocabulary.is_whole:
            return self.weights.embedding.index_select(0, input_ids)
        rows = input_ids - self.vocabulary.start
        is_foreign = (rows < 0) | (rows >= self.vocabulary.num_held)
        embedded = self.weights.embedding.index_select(0, rows.masked_fill(is_foreign, 0))
        return self.ranks.all_reduce(embedded.masked_fill_(is_foreign[:, None], 0.0))

    def _project(
        self, layer: LayerWeights, normed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key, value of the layer, not turned yet."""
        config, eps = self.config, self.config.rms_norm_eps
        qkv = self._linear(normed, layer.qkv)
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        query, key, value = heads.split(sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = rms_norm(query, layer.q_norm, eps), rms_norm(key, layer.k_norm, eps)
        return query, key, value

    def _mlp(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        if isinstance(layer.gate_up, Fp8Linear):
            activated = silu_mul(fp8_linear(normed, layer.gate_up))
        else:
            activated = linear_silu_mul(normed, layer.gate_up, deterministic=self.is_deterministic)
        return self._linear(activated, layer.down)

    def _linear(self, x: torch.Tensor, packed: Linear) -> torch.Tensor:
        if isinstance(packed, Fp8Linear):
            return fp8_linear(x, packed)
        return linear(x, packed, deterministic=self.is_deterministic)


def build_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    ranks: Ranks = SINGLE_RANK,
    *,
    is_deterministic: bool = False,
) -> Decoder:
    """`config` is the whole model's, `weights` are the rank's."""
    shard = shard_of(config, ranks)
    rope = build_rope(config.rope, config.head_dim)
    rope = Rope(rope.inverse_frequencies.to(weights.device), rope.scaling)
    return Decoder(shard.local, weights, rope, ranks, shard.vocabulary, is_deterministic)
