"""The specification: what codes stand for, computed in float32 and rounded once to the dtype of the
pages. Tokens of bfloat16 are copied."""

from collections.abc import Callable

import torch

from kernels.contract import Contract, Count, InOut, Tensor
from kernels.kv_quantise.layout import slabs_of_block
from kernels.kv_quantise.reference import (
    Packed,
    blocks_of,
    dequantised_keys,
    dequantised_values,
)

KEY_CONTRACT, VALUE_CONTRACT = (
    Contract(
        f"kv_restore_{what}",
        slabs=Tensor("slots grain heads 32*size", torch.uint8, wide_index=True),
        meta=Tensor(f"slots heads 2 {meta_size}", torch.float16, wide_index=True),
        sources=Tensor("blocks width", torch.int32, align=4),
        pages=InOut("pages 64 heads size", (torch.bfloat16, torch.float32), wide_index=True),
        targets=Tensor("blocks", (torch.int32, torch.int64), align=4),
        num_slots=Count("slots"),
        num_pages=Count("pages"),
        num_heads=Count("heads"),
    )
    for what, meta_size in (("keys", "size"), ("values", "64"))
)


def meta_of(bits: int, grain: int, size: int) -> dict[str, int]:
    """What a kernel is launched with."""
    return {"BITS": bits, "GRAIN": grain, "SIZE": size, "num_warps": 4}


# Of heads of the usual size: what a cold tier of 8-bit keys and 4-bit values has of a prompt.
SERVED_KEY_METAS = [meta_of(bits, slabs_of_block(8), 128) for bits in (8, 16)]
SERVED_VALUE_METAS = [meta_of(bits, slabs_of_block(4), 128) for bits in (4, 16)]


def restore_keys(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    pages: torch.Tensor,
    targets: torch.Tensor,
    bits: int,
) -> None:
    """slabs [num_slabs, heads, 32 * size] uint8, meta [num_slabs // grain, heads, 2, size] float16;
    pages [num_pages, 64, heads, size], changed in place: page targets[i] becomes what the block
    sources[i] [slabs of a block of bits] stands for. No page is named twice."""
    _restore(slabs, meta, sources, pages, targets, bits, dequantised_keys)


def restore_values(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    pages: torch.Tensor,
    targets: torch.Tensor,
    bits: int,
) -> None:
    """As `restore_keys`, with meta [num_slabs // grain, heads, 2, 64]."""
    _restore(slabs, meta, sources, pages, targets, bits, dequantised_values)


def _restore(
    slabs: torch.Tensor,
    meta: torch.Tensor,
    sources: torch.Tensor,
    pages: torch.Tensor,
    targets: torch.Tensor,
    bits: int,
    dequantised: Callable[[Packed, int, torch.dtype], torch.Tensor],
) -> None:
    blocks = blocks_of(slabs, meta, sources, bits, dequantised)  # [num_blocks, heads, 64, size]
    pages[targets.long()] = blocks.transpose(1, 2).to(pages.dtype)
