"""Slabs in grains: as many neighbours as a block of an arena's densest format takes, with one slot
of metadata for all of them."""

import torch

from kernels.errors import ContractError
from kernels.kv_quantise.layout import slabs_of_block

GRAINS = (1, 2)


def grain_of(slabs: torch.Tensor, meta: torch.Tensor) -> int:
    """Slabs of a slot: slab n has slot n // grain."""
    return len(slabs) // len(meta) if len(meta) else 1


def by_grains(
    kernel: str, name: str, slabs: torch.Tensor, meta: torch.Tensor, bits: int
) -> torch.Tensor:
    """slabs [num_slabs, heads, bytes] -> [num_slots, grain, heads, bytes], the same memory. name:
    of `meta`. Raises ContractError, also where a block of `bits` is no whole number of grains."""
    grain = grain_of(slabs, meta)
    if grain not in GRAINS or grain > slabs_of_block(bits) or len(slabs) != grain * len(meta):
        grains = [each for each in GRAINS if each <= slabs_of_block(bits)]
        slots = " or ".join(str(len(slabs) // each) for each in grains)
        expected = f"of {slots} slots, for {len(slabs)} slabs and blocks of {bits} bits"
        raise ContractError(kernel, name, expected, f"{len(meta)}")
    return slabs.view(len(meta), grain, *slabs.shape[1:])
