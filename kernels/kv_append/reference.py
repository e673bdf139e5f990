"""The specification: keys and values, copied."""

import torch

from kernels.contract import FLOATS, Contract, Count, InOut, Size, Stride, Tensor

CONTRACT = Contract(
    "kv_append",
    key=Tensor("tokens heads size", FLOATS, layout="rows", wide_index=True),
    value=Tensor("tokens heads size", like="key", layout="rows", wide_index=True),
    key_cache=InOut("blocks block_size heads size", like="key", wide_index=True),
    value_cache=InOut("blocks block_size heads size", like="key", wide_index=True),
    slot_mapping=Tensor("tokens", torch.int64, align=8),
    key_token_stride=Stride("key", 0),
    key_head_stride=Stride("key", 1),
    value_token_stride=Stride("value", 0),
    value_head_stride=Stride("value", 1),
    blocks=Count("blocks"),
    block_size=Count("block_size"),
    heads=Count("heads"),
    size=Size("size"),
)
# A program appends HEADS heads of one token. A head lies within BLOCK.
METAS = (
    {"HEADS": 8, "BLOCK": 128, "num_warps": 4},
    {"HEADS": 4, "BLOCK": 256, "num_warps": 4},
)


def kv_append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Token i goes to slot `slot_mapping[i]` = block * block_size + offset, or nowhere if it is -1.

    key, value [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads,
    head_dim], changed in place; slot_mapping [num_tokens] int64, no slot twice.
    """
    has_slot = slot_mapping >= 0
    if not has_slot.all():
        key, value, slot_mapping = key[has_slot], value[has_slot], slot_mapping[has_slot]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
