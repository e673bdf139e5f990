"""Blocks of the KV cache as payloads: the bytes that leave the device and come back.

A payload is `[2 * num_layers, block_size, num_kv_heads, head_dim]` in the dtype of the cache: the
keys of all layers, then the values.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.cache.tiers import Payload
from engine.errors import IntegrityError
from engine.execution.kv_tensors import KVTensors

MAX_STAGED_BLOCKS = 16  # bounds what is allocated beside the pool: 128 MiB of an 8B model in bf16


def copy_out(kv: KVTensors, block_ids: Sequence[int]) -> list[Payload]:
    """A payload for each block, in host memory that nothing writes into again."""
    payloads: list[Payload] = []
    for group in _groups(len(block_ids)):
        index = torch.tensor(block_ids[group], device=kv.device)
        staged = torch.stack([each.index_select(0, index) for each in kv.tensors], dim=1)
        rows = staged.view(len(index), -1).view(torch.uint8).cpu()
        payloads += [memoryview(row.numpy()) for row in rows]
    return payloads


def copy_in(kv: KVTensors, block_ids: Sequence[int], payloads: Sequence[Payload]) -> None:
    """Overwrite blocks, each at most once. The payloads are not needed afterwards. Raises
    IntegrityError for one of another size."""
    for group in _groups(len(block_ids)):
        staging = torch.empty((len(block_ids[group]), kv.block_bytes), dtype=torch.uint8)
        for row, payload in zip(staging.numpy(), payloads[group], strict=True):
            content = np.frombuffer(payload, np.uint8)  # read-only: torch would warn
            if content.size != kv.block_bytes:
                raise IntegrityError(
                    f"a payload of {content.size} bytes came back for a block of "
                    f"{kv.block_bytes}; count CACHE_LAYOUT_VERSION up when the layout changes"
                )
            row[:] = content
        index = torch.tensor(block_ids[group], device=kv.device)
        blocks = staging.view(kv.dtype).view(-1, len(kv.tensors), *kv.block_shape).to(kv.device)
        for number, tensor in enumerate(kv.tensors):
            tensor.index_copy_(0, index, blocks[:, number])


def _groups(num_blocks: int) -> Iterator[slice]:
    for start in range(0, num_blocks, MAX_STAGED_BLOCKS):
        yield slice(start, start + MAX_STAGED_BLOCKS)
