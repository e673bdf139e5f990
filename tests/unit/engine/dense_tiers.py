"""Attention over tiers as their rule says it, by absolute positions: no block tables, no slabs, no
steps; every block is rounded when it ages, and that is all."""

from collections.abc import Iterator

import torch

from engine.cache.formats import BLOCK_SIZE, Format, Part
from engine.cache.tier_config import Ages, TierConfig
from kernels.kv_quantise.reference import (
    dequantised_keys,
    dequantised_values,
    quantised_keys,
    quantised_values,
)

BITS = {Format.INT8: 8, Format.INT4: 4}


def attended(
    config: TierConfig,
    num_prompt_tokens: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """query [num_tokens, num_heads, size], turned and rotated, keys, values [num_tokens,
    num_kv_heads, size] of a whole sequence, in bf16, turned and rotated -> like query, float64."""
    num_tokens = len(query)
    stored = [
        AgingTokens(config, part, each) for part, each in zip(Part, (keys, values), strict=True)
    ]
    out = []
    for start, end, ages in _spans(config, num_prompt_tokens, num_tokens):
        seen_keys, seen_values = (each.seen(ages, end) for each in stored)
        grouped = query[start:end].double().unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("qhgd,khd->hgqk", grouped, seen_keys) * scale
        is_ahead = torch.arange(end) > torch.arange(start, end)[:, None]
        weights = scores.masked_fill(is_ahead, float("-inf")).softmax(-1)
        out.append(torch.einsum("hgqk,khd->qhgd", weights, seen_values).flatten(1, 2))
    return torch.cat(out)


class AgingTokens:
    """The keys, or the values, of one sequence."""

    def __init__(self, config: TierConfig, part: Part, tokens: torch.Tensor) -> None:
        self._config = config
        self._part = part
        # As kernels compute them, in float32: what is rounded is rounded from that.
        self._blocks = [each.float() for each in tokens.split(BLOCK_SIZE)]
        self._formats = [Format.BF16] * len(self._blocks)

    def seen(self, ages: Ages, end: int) -> torch.Tensor:
        """[end, num_kv_heads, size] float64. Ages never move back."""
        for index, was in enumerate(self._formats):
            now = self._config.format_at(ages, index)[self._part]
            if now is not was and index < ages.hot_start:
                self._blocks[index] = self._rounded(self._blocks[index], BITS[now])
                self._formats[index] = now
        return torch.cat(self._blocks)[:end].double()

    def _rounded(self, block: torch.Tensor, bits: int) -> torch.Tensor:
        heads = block.transpose(0, 1)
        if self._part is Part.KEYS:
            rounded = dequantised_keys(quantised_keys(heads, bits), bits, torch.float32)
        else:
            rounded = dequantised_values(quantised_values(heads, bits), bits, torch.float32)
        return rounded.transpose(0, 1)


def _spans(
    config: TierConfig, num_prompt_tokens: int, num_tokens: int
) -> Iterator[tuple[int, int, Ages]]:
    for start in range(0, num_prompt_tokens, config.cell_tokens):
        end = min(start + config.cell_tokens, num_prompt_tokens)
        yield start, end, config.prefill_ages(start)
    start = num_prompt_tokens
    while start < num_tokens:  # the ages of decodes are those of their block
        end = min((start // BLOCK_SIZE + 1) * BLOCK_SIZE, num_tokens)
        yield start, end, config.decode_ages(start)
        start = end
