"""Attention of whole sequences over a history that has aged as in a tiered cache, with gradients.

Every query sees what a decoded token at its position would. Keys and values are rounded as on their
way through the tiers; what is rounded passes its gradient on as if it were not (straight-through:
Bengio et al., 2013), for rounding has none of its own.
"""

from collections.abc import Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.cache.formats import BLOCK_SIZE, WARM, BlockFormat, Part
from engine.cache.tier_config import TierConfig
from engine.models.calibrate import BITS
from kernels.kv_quantise.reference import (
    dequantised_keys,
    dequantised_values,
    quantised_keys,
    quantised_values,
)
from kernels.tiered_append.hadamard import rotated

QUERY_BLOCKS = 8  # attended at a time: masks stay small, and few keys are read in vain


class Age(IntEnum):
    """Of a block as a query sees it. The sink stays as young as what is hot."""

    YOUNG = 0
    COLD = 1
    WARM = 2


RUNS = (Age.YOUNG, Age.COLD, Age.WARM, Age.YOUNG)  # what TierConfig.runs gives, in its order


class View(NamedTuple):
    """What the queries [start, end) of a sequence see: by age the blocks that any of them sees in
    that age, and which tokens of these each query sees [end - start, num_keys], ages in order. A
    query sees a token in one age at most."""

    start: int
    end: int
    blocks: Mapping[Age, torch.Tensor]
    is_seen: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        """Of these tokens in the sequence [num_keys]."""
        return _tokens_of(torch.cat(list(self.blocks.values())))


def aged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiers: TierConfig,
    *,
    hide_cold: bool = False,
    is_visible: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """query [batch, num_heads, num_tokens, head_dim], turned; key, value of num_kv_heads -> like
    query. `hide_cold`: cold blocks are not seen at all. `is_visible` bool [batch, 1, num_tokens,
    num_tokens] hides more. `scale` of scores, by default head_dim ** -0.5."""
    num_padding = -query.shape[2] % BLOCK_SIZE
    num_blocks = (query.shape[2] + num_padding) // BLOCK_SIZE
    keys = _by_age(Part.KEYS, F.pad(key, (0, 0, 0, num_padding)), tiers)
    values = _by_age(Part.VALUES, F.pad(value, (0, 0, 0, num_padding)), tiers)
    if is_visible is not None:
        is_visible = F.pad(is_visible, (0, num_padding)).repeat_interleave(key.shape[1], 0)
    attended = []
    for view in views_of(tiers, hide_cold, num_blocks, query.device):
        rows = query[:, :, view.start : view.end]
        mask = view.is_seen[: rows.shape[2]]
        if is_visible is not None:
            mask = mask & is_visible[:, :, view.start : view.end, view.places]
        seen_keys, seen_values = _seen(keys, view.blocks), _seen(values, view.blocks)
        attended.append(_attended(rows, seen_keys, seen_values, mask, scale, dropout))
    return torch.cat(attended, 2)


def has_aged(tiers: TierConfig, num_tokens: int) -> bool:
    """Whether the last of them sees anything but what is young."""
    ages = tiers.decode_ages(num_tokens - 1)
    return ages.cold_start < ages.hot_start


@lru_cache(maxsize=8)
def views_of(
    tiers: TierConfig, hide_cold: bool, num_blocks: int, device: torch.device
) -> tuple[View, ...]:
    """Of a sequence of `num_blocks` blocks, some queries after others."""
    shown = [age for age in Age if not (hide_cold and age is Age.COLD)]
    with torch.inference_mode(False):  # backward passes read them, whoever asked first
        ages = _block_ages(tiers, num_blocks, device)
        return tuple(
            _view(ages, start, min(start + QUERY_BLOCKS, num_blocks), shown)
            for start in range(0, num_blocks, QUERY_BLOCKS)
        )


def _view(ages: torch.Tensor, start: int, end: int, shown: list[Age]) -> View:
    rows, queries = ages[start:end], _tokens_of(torch.arange(start, end, device=ages.device))
    blocks = {age: (rows == age).any(0).nonzero().flatten() for age in shown}
    is_seen = torch.cat([rows[:, each] == age for age, each in blocks.items()], 1)
    for dim in (0, 1):
        is_seen = is_seen.repeat_interleave(BLOCK_SIZE, dim)
    places = _tokens_of(torch.cat(list(blocks.values())))
    return View(
        int(queries[0]), int(queries[-1]) + 1, blocks, is_seen & (places <= queries[:, None])
    )


def _block_ages(tiers: TierConfig, num_blocks: int, device: torch.device) -> torch.Tensor:
    """[query block, key block] int8: an Age, or -1 of blocks to come."""
    ages = torch.full((num_blocks, num_blocks), -1, dtype=torch.int8)
    for block, row in enumerate(ages):
        runs = tiers.runs(tiers.decode_ages(block * BLOCK_SIZE), block + 1)
        for age, (start, end, _) in zip(RUNS, runs, strict=True):
            row[start:end] = age
    return ages.to(device)


def _tokens_of(blocks: torch.Tensor) -> torch.Tensor:
    """blocks [num_blocks] -> the places of their tokens [num_blocks * 64]."""
    return (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=blocks.device)).flatten()


def _by_age(part: Part, heads: torch.Tensor, tiers: TierConfig) -> dict[Age, torch.Tensor]:
    """heads [batch, num_kv_heads, num_tokens, head_dim], whole blocks -> of each age the blocks
    [batch, num_kv_heads, blocks, 64, head_dim] that are ever as old, from the first one on."""
    blocks = heads.unflatten(2, (-1, BLOCK_SIZE))
    ages = tiers.decode_ages(heads.shape[2] - 1)
    aged = blocks[:, :, : ages.hot_start]
    with torch.no_grad():
        warm = _read_back(part, rotated(aged.float()).bfloat16(), WARM)
        cold = warm[:, :, : ages.warm_start]
        if tiers.cold[part] is not WARM[part]:
            cold = _read_back(part, cold, tiers.cold)
    stored = {
        age: _StraightThrough.apply(aged[:, :, : each.shape[2]], rotated(each).to(heads.dtype))
        for age, each in ((Age.COLD, cold), (Age.WARM, warm))
    }
    return {Age.YOUNG: blocks, **stored}


def _read_back(part: Part, blocks: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    """Rotated blocks [..., 64, head_dim], as they are before -> float32 in `block_format`."""
    bits = BITS[block_format[part]]
    if part is Part.KEYS:
        return dequantised_keys(quantised_keys(blocks, bits), bits, torch.float32)
    return dequantised_values(quantised_values(blocks, bits), bits, torch.float32)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        return stored.view_as(stored)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _seen(by_age: Mapping[Age, torch.Tensor], blocks: Mapping[Age, torch.Tensor]) -> torch.Tensor:
    """[batch, num_kv_heads, num_keys, head_dim]."""
    return torch.cat([by_age[age][:, :, each] for age, each in blocks.items()], 2).flatten(2, 3)


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """keys, values [batch, num_kv_heads, num_keys, head_dim], mask [num_tokens, num_keys] or
    [batch * num_kv_heads, 1, num_tokens, num_keys] -> like query."""
    batch, num_kv_heads = keys.shape[:2]
    grouped = query.unflatten(1, (num_kv_heads, -1)).flatten(0, 1)
    keys, values = (
        each.flatten(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1) for each in (keys, values)
    )
    attended = F.scaled_dot_product_attention(
        grouped, keys, values, mask, dropout_p=dropout, scale=scale
    )
    heads: torch.Tensor = attended.unflatten(0, (batch, -1)).flatten(1, 2)
    return heads
