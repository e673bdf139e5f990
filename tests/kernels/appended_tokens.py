"""Tokens of a fused projection, and slabs that they are to be appended to."""

from typing import NamedTuple

import torch


class Appended(NamedTuple):
    """The arguments of tiered_append."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    key_slabs: torch.Tensor
    value_slabs: torch.Tensor
    key_slots: torch.Tensor
    value_slots: torch.Tensor


def appended(
    num_tokens: int, num_heads: int, num_kv_heads: int, size: int, num_slabs: int = 4
) -> Appended:
    """The same ones each time; the slabs hold any bytes, NaN among them."""
    generator = torch.Generator().manual_seed(num_tokens)
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, size, generator=generator)
    angles = 3 * torch.randn(num_tokens, 1, size, generator=generator)
    slabs = torch.randint(
        256, (2, num_slabs, num_kv_heads, 32 * size), dtype=torch.uint8, generator=generator
    )
    return Appended(
        *fused.bfloat16().split((num_heads, num_kv_heads, num_kv_heads), dim=1),
        angles.cos().bfloat16(),
        angles.sin().bfloat16(),
        *slabs,
        *(scattered_slots(num_tokens, num_slabs, seed) for seed in (4, 5)),
    )


def scattered_slots(num_tokens: int, num_slabs: int, seed: int) -> torch.Tensor:
    """Every third token has none; which ones, depends on the seed."""
    slots = torch.randperm(16 * num_slabs, generator=torch.Generator().manual_seed(seed))
    slots = slots[:num_tokens].clone()
    slots[seed % 3 :: 3] = -1
    return slots
