"""Entry points of the op."""

import torch

from kernels.errors import ContractError
from kernels.kv_quantise import reference
from kernels.kv_quantise.grains import by_grains
from kernels.kv_quantise.layout import BLOCK_TOKENS, slabs_of_block
from kernels.launch import Launcher, runs_kernels

_launch_keys = Launcher(
    reference.KEY_CONTRACT, "kernels.kv_quantise.kernel:kv_quantise_keys_kernel"
)
_launch_values = Launcher(
    reference.VALUE_CONTRACT, "kernels.kv_quantise.kernel:kv_quantise_values_kernel"
)


def quantise_keys(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    from_bits: int,
    bits: int,
) -> None:
    """slabs [num_slabs, heads, 32 * size] uint8 and meta [num_slabs // grain, heads, 2, size]
    float16, changed in place: each block of `sources` [num_blocks, slabs of a block of from_bits]
    int32 goes to `targets` [num_blocks, slabs of a block of bits] int32. From 16 bits to 8 or 4, or
    from 8 to 4; no slab is named twice. The grain is 1, or 2 where no block is of 4 bits: then the
    tables have slabs 2g and 2g + 1 side by side. On a GPU size is 64, 128 or 256, or
    ContractError."""
    if runs_kernels(slabs):
        width = slabs.shape[2] // 64  # channels of a half
        _quantise(_launch_keys, width, slabs, meta, sources, targets, from_bits, bits)
    else:
        reference.quantise_keys(slabs, meta, sources, targets, from_bits, bits)


def quantise_values(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    from_bits: int,
    bits: int,
) -> None:
    """As `quantise_keys`, with meta [num_slabs // grain, heads, 2, 64]."""
    if runs_kernels(slabs):
        _quantise(_launch_values, BLOCK_TOKENS, slabs, meta, sources, targets, from_bits, bits)
    else:
        reference.quantise_values(slabs, meta, sources, targets, from_bits, bits)


def _quantise(
    launch: Launcher,
    width: int,
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    from_bits: int,
    bits: int,
) -> None:
    num_heads, size = slabs.shape[1], slabs.shape[2] // 32
    assert (from_bits, bits) in reference.FROM_TO_BITS, (from_bits, bits)
    assert sources.shape[1] == slabs_of_block(from_bits), (sources.shape, from_bits)
    assert targets.shape[1] == slabs_of_block(bits), (targets.shape, bits)
    if size not in reference.SIZES:
        expected = f"of heads of {' or '.join(map(str, reference.SIZES))}"
        raise ContractError(launch.contract.kernel, "slabs", expected, f"{size}")
    slabs = by_grains(launch.contract.kernel, "meta", slabs, meta, bits)
    form = reference.meta_of(from_bits, bits, slabs.shape[1], size)
    grid = (len(sources), num_heads, width // reference.TILE)
    launch(grid, slabs, meta, sources, targets, len(meta), num_heads, **form)
