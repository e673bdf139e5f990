"""Caches of slabs of which some cold blocks are skipped."""

from typing import NamedTuple

import torch

from kernels.tiered_decode.reference import dequantised
from kernels.tiered_plan.reference import Formats
from kernels.tiered_skip.reference import num_cold_of
from kernels.tiered_skip.rounding import reach_of_blocks, reach_of_tokens
from tests.kernels.slab_caches import Cache, slab_cache, tokens_of


class Skipping(NamedTuple):
    """skips, masses, left_out, reach: as `tiered_skip` takes them."""

    query: torch.Tensor
    cache: Cache
    formats: Formats
    scale: float
    skips: torch.Tensor
    masses: torch.Tensor
    left_out: torch.Tensor
    reach: torch.Tensor

    @property
    def bounds(self) -> torch.Tensor:
        return self.cache.bounds


def skipping(
    bounds: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    size: int,
    formats: Formats,
    share: float = 0.5,
    cache: Cache | None = None,
) -> Skipping:
    """share: of blocks, chosen at random; also past the last of a sequence."""
    if cache is None:
        cache = slab_cache(bounds, num_kv_heads, size, formats)
    blocks = max([num_cold_of(each, formats) for each in bounds.tolist()], default=0) + 1
    shape = len(bounds), num_kv_heads, blocks
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(blocks))
    return Skipping(
        tokens_of(len(bounds), num_heads, size, seed=9).transpose(0, 1),
        cache,
        formats,
        size**-0.5,
        (drawn < share).int(),
        torch.full((*shape, num_heads // num_kv_heads), float("nan")),
        (drawn < share).int(),
        reach_of(cache, formats),
    )


def reach_of(cache: Cache, formats: Formats) -> torch.Tensor:
    """[num_sequences, num_kv_heads]: of all that a sequence has, as plain tokens where it is."""
    slabs, tables, _, bounds = cache
    size = slabs.key_meta.shape[3]
    grain = len(slabs.keys) // len(slabs.key_meta)
    reach = torch.zeros(len(bounds), slabs.key_meta.shape[1])
    for row, each in enumerate(bounds.tolist()):
        sink, cold, warm, _ = each
        keys = dequantised(slabs, tables[row], each, formats, is_keys=True)
        plain = torch.cat([keys[:, :sink], keys[:, warm:]], 1)
        if plain.shape[1]:
            reach[row] = reach_of_tokens(plain.norm(dim=-1).amax(1), size)
        at = sink // 16
        for tokens, bits in ((cold - sink, formats.key_bits), (warm - cold, 8)):
            chosen = tables[row, at : at + tokens * bits // 256].long() // grain
            at += tokens * bits // 256
            if len(chosen):
                found = reach_of_blocks(slabs.key_meta[chosen], bits).amax(0)
                reach[row] = torch.maximum(reach[row], found)
    return reach
