"""The specification: queries and keys turned as `rotary` turns them, then what `kv_append` does."""

import torch

from kernels.contract import FLOATS, Contract, Count, InOut, Output, Size, Stride, Tensor
from kernels.kv_append import reference as kv_append
from kernels.rotary import reference as rotary

CONTRACT = Contract(
    "rope_append",
    query=Tensor("tokens heads 2*half", FLOATS, layout="rows", wide_index=True),
    key=Tensor("tokens kv_heads 2*half", like="query", layout="rows", wide_index=True),
    value=Tensor("tokens kv_heads 2*half", like="query", layout="rows", wide_index=True),
    cos=Tensor("tokens 1 2*half", like="query", wide_index=True),
    sin=Tensor("tokens 1 2*half", like="query", wide_index=True),
    key_cache=InOut("blocks block_size kv_heads 2*half", like="query", wide_index=True),
    value_cache=InOut("blocks block_size kv_heads 2*half", like="query", wide_index=True),
    slot_mapping=Tensor("tokens", torch.int64, align=8),
    out=Output("tokens heads 2*half", like="query", wide_index=True),
    query_token_stride=Stride("query", 0),
    query_head_stride=Stride("query", 1),
    key_token_stride=Stride("key", 0),
    key_head_stride=Stride("key", 1),
    value_token_stride=Stride("value", 0),
    value_head_stride=Stride("value", 1),
    blocks=Count("blocks"),
    block_size=Count("block_size"),
    heads=Count("heads"),
    kv_heads=Count("kv_heads"),
    half=Size("half"),
)
# A program has HEADS query heads or HEADS KV heads of one token. Half a head lies within HALF.
METAS = (
    {"HEADS": 8, "HALF": 64, "num_warps": 4},
    {"HEADS": 4, "HALF": 128, "num_warps": 4},
)


def rope_append(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """-> the turned query; the turned key and the value go to their slots, or nowhere if it is -1.

    query [num_tokens, num_heads, head_dim], key, value [num_tokens, num_kv_heads, head_dim], cos,
    sin [num_tokens, 1, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim], changed
    in place; slot_mapping [num_tokens] int64, no slot twice.
    """
    turned = rotary.rotary(key, cos, sin)
    kv_append.kv_append(turned, value, key_cache, value_cache, slot_mapping)
    return rotary.rotary(query, cos, sin)
