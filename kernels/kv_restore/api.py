"""Entry points of the op."""

import torch

from kernels.errors import ContractError
from kernels.kv_quantise.grains import by_grains
from kernels.kv_quantise.layout import slabs_of_block
from kernels.kv_quantise.reference import SIZES
from kernels.kv_restore import reference
from kernels.launch import Launcher, runs_kernels

_launch_keys = Launcher(reference.KEY_CONTRACT, "kernels.kv_restore.kernel:kv_restore_keys_kernel")
_launch_values = Launcher(
    reference.VALUE_CONTRACT, "kernels.kv_restore.kernel:kv_restore_values_kernel"
)


def restore_keys(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    pages: torch.Tensor,
    targets: torch.Tensor,
    bits: int,
) -> None:
    """slabs [num_slabs, heads, 32 * size] uint8, meta [num_slabs // grain, heads, 2, size] float16;
    pages [num_pages, 64, heads, size] bfloat16 or float32, changed in place: page targets[i]
    becomes what the block sources[i] stands for. sources [num_blocks, slabs of a block of bits]
    int32; targets [num_blocks] int32 or int64, no page twice; bits 16, 8, or 4 where the grain is
    1. The tables may begin anywhere in memory. On a GPU size is 64, 128 or 256, or
    ContractError."""
    if runs_kernels(pages):
        _restore(_launch_keys, slabs, meta, sources, pages, targets, bits)
    else:
        reference.restore_keys(slabs, meta, sources, pages, targets, bits)


def restore_values(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    pages: torch.Tensor,
    targets: torch.Tensor,
    bits: int,
) -> None:
    """As `restore_keys`, with meta [num_slabs // grain, heads, 2, 64]."""
    if runs_kernels(pages):
        _restore(_launch_values, slabs, meta, sources, pages, targets, bits)
    else:
        reference.restore_values(slabs, meta, sources, pages, targets, bits)


def _restore(
    launch: Launcher,
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    pages: torch.Tensor,
    targets: torch.Tensor,
    bits: int,
) -> None:
    num_pages, _, num_heads, size = pages.shape
    assert sources.shape[1] == slabs_of_block(bits), (sources.shape, bits)
    if size not in SIZES:
        expected = f"of heads of {' or '.join(map(str, SIZES))}"
        raise ContractError(launch.contract.kernel, "pages", expected, f"{size}")
    slabs = by_grains(launch.contract.kernel, "meta", slabs, meta, bits)
    form = reference.meta_of(bits, slabs.shape[1], size)
    grid = (len(sources) * num_heads,)
    sizes = len(meta), num_pages, num_heads
    launch(grid, slabs, meta, sources, pages, targets, *sizes, **form)
