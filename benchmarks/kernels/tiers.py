"""Whole blocks of a tiered cache, of a prompt of an 8B Llama: the pages of one layer."""

from collections.abc import Callable, Iterator

import torch

from benchmarks.kernels.case import Arguments, Case
from kernels.kv_quantise.layout import BLOCK_TOKENS, part_bytes, slabs_of_block
from kernels.kv_restore import reference
from kernels.kv_restore.api import restore_keys, restore_values

NUM_TOKENS, NUM_KV_HEADS, SIZE = 32768, 8, 128
NUM_BLOCKS = NUM_TOKENS // BLOCK_TOKENS
ITEM_BYTES = 2  # of a page, and of metadata


def tier_cases() -> Iterator[Case]:
    """They move 85 and 102 MB: of the default cold tier, 8-bit keys and 4-bit values."""
    yield _restore("kv_restore_keys", restore_keys, reference.restore_keys, 8, SIZE)
    yield _restore("kv_restore_values", restore_values, reference.restore_values, 4, BLOCK_TOKENS)


def _restore(
    name: str,
    ours: Callable[..., None],
    plain: Callable[..., None],
    bits: int,
    num_pairs: int,  # scales and zeros of a block and head
) -> Case:
    """Blocks are scattered, each with one slot of metadata."""
    width = slabs_of_block(bits)

    def arguments() -> Arguments:
        shape = (NUM_BLOCKS * width, NUM_KV_HEADS, part_bytes(SIZE))
        slabs = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
        shape = (NUM_BLOCKS, NUM_KV_HEADS, 2, num_pairs)
        meta = torch.randn(shape, device="cuda", dtype=torch.float16)
        sources, targets = (torch.randperm(NUM_BLOCKS, device="cuda").int() for _ in "st")
        sources = sources[:, None] * width + torch.arange(width, device="cuda").int()
        shape = (NUM_BLOCKS, BLOCK_TOKENS, NUM_KV_HEADS, SIZE)
        pages = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
        return slabs, meta, sources, pages.zero_(), targets, bits

    block_bytes = NUM_KV_HEADS * BLOCK_TOKENS * SIZE * (bits / 8 + ITEM_BYTES)
    block_bytes += NUM_KV_HEADS * 2 * num_pairs * ITEM_BYTES + 4 * (width + 1)
    return Case(
        name,
        f"{NUM_TOKENS} x {NUM_KV_HEADS} x {SIZE}, {bits} bits to bfloat16",
        ours,
        plain,
        arguments,
        num_bytes=int(NUM_BLOCKS * block_bytes),
    )
