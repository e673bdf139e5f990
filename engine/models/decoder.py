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
        cos, sin = self.turns(positions)
        normed, residual = self.embed(input_ids)
        last = len(self.weights.layers) - 1
        for layer in range(last + 1):
            attended = attend(layer, *self.project(layer, normed), cos, sin)
            if rows is not None and layer == last:
                # From here on no token is looked at by another: the others are done.
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
            normed = self.conclude(layer, attended, residual)
        return normed

    def turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [num_tokens, 1, head_dim]."""
        return self.rope.cos_sin(positions, self.weights.dtype)

    def embed(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens] -> two of [num_tokens, hidden_size]: what the first layer projects, and the
        residual, float32."""
        embedded = self._embed(input_ids)
        first = self.weights.layers[0].input_norm
        return rms_norm(embedded, first, self.config.rms_norm_eps), embedded.float()

    def project(
        self, layer: int, normed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """query, key, value of the layer, not turned yet."""
        config, weights = self.config, self.weights.layers[layer]
        qkv = self._linear(normed, weights.qkv)
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        query, key, value = heads.split(sizes, dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            query = rms_norm(query, weights.q_norm, config.rms_norm_eps)
            key = rms_norm(key, weights.k_norm, config.rms_norm_eps)
        return query, key, value

    def conclude(self, layer: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The layer behind its attention: attended [num_rows, num_heads, head_dim] -> [num_rows,
        hidden_size], normed for the next layer, or by the last norm. `residual` moves on in
        place."""
        layers, eps = self.weights.layers, self.config.rms_norm_eps
        is_last = layer == len(layers) - 1
        next_norm = self.weights.final_norm if is_last else layers[layer + 1].input_norm
        update = self.ranks.all_reduce(self._linear(attended.flatten(1), layers[layer].output))
        normed = rms_norm(update, layers[layer].post_attention_norm, eps, residual)
        update = self.ranks.all_reduce(self._mlp(layers[layer], normed))
        return rms_norm(update, next_norm, eps, residual)

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
