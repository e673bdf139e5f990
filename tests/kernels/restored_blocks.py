"""Blocks as a restoring kernel must take them: anywhere in an arena of NaN, for pages of NaN among
others."""

from typing import Any

import torch

from kernels.kv_restore import reference
from kernels.kv_restore.api import restore_keys, restore_values
from tests.kernels.quantised_blocks import arena

RESTORES = {
    "keys": (restore_keys, reference.restore_keys),
    "values": (restore_values, reference.restore_values),
}
FORMS = ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2))  # bits, slabs of a slot


def stored(
    kind: str,
    bits: int,
    grain: int,
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    num_blocks: int = 2,
) -> tuple[Any, ...]:
    """The arguments of a call."""
    slabs, meta, sources, _ = arena(kind, bits, size, num_blocks, grain)
    num_pages, heads = num_blocks + 3, slabs.shape[1]
    pages = torch.full((num_pages, 64, heads, size), float("nan"), dtype=dtype)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(2))
    return slabs, meta, sources, pages, order[:num_blocks].int(), bits
