"""The specification: turned as `rotary` turns, but in float32, rotated in float32, rounded once."""

import torch

from kernels.contract import Contract, Count, InOut, Output, Stride, Tensor
from kernels.kv_quantise.layout import SLAB_TOKENS
from kernels.tiered_append.hadamard import rotated
from kernels.tiered_plan.reference import TOKEN_BITS

CONTRACT = Contract(
    "tiered_append",
    query=Tensor("tokens heads size", torch.bfloat16, layout="rows", wide_index=True),
    key=Tensor("tokens kv_heads size", like="query", layout="rows", wide_index=True),
    value=Tensor("tokens kv_heads size", like="query", layout="rows", wide_index=True),
    cos=Tensor("tokens 1 size", like="query", wide_index=True),
    sin=Tensor("tokens 1 size", like="query", wide_index=True),
    key_slabs=InOut("slabs kv_heads 32*size", torch.uint8, wide_index=True),
    value_slabs=InOut("value_slabs kv_heads 32*size", torch.uint8, wide_index=True),
    key_slots=Tensor("tokens", torch.int64, align=8),
    value_slots=Tensor("tokens", torch.int64, align=8),
    out=Output("tokens heads size", like="query", wide_index=True),
    query_token_stride=Stride("query", 0),
    query_head_stride=Stride("query", 1),
    key_token_stride=Stride("key", 0),
    key_head_stride=Stride("key", 1),
    value_token_stride=Stride("value", 0),
    value_head_stride=Stride("value", 1),
    num_keys=Count("slabs"),
    num_values=Count("value_slabs"),
    heads=Count("heads"),
    kv_heads=Count("kv_heads"),
)
SLAB = SLAB_TOKENS[TOKEN_BITS]
# A program has HEADS query heads or HEADS KV heads, of SIZE, of one token.
METAS = (
    {"HEADS": 16, "SIZE": 64, "num_warps": 4},
    {"HEADS": 8, "SIZE": 128, "num_warps": 4},
    {"HEADS": 4, "SIZE": 256, "num_warps": 4},
)
SIZES = tuple(meta["SIZE"] for meta in METAS)


def tiered_append(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_slabs: torch.Tensor,
    value_slabs: torch.Tensor,
    key_slots: torch.Tensor,
    value_slots: torch.Tensor,
) -> torch.Tensor:
    """-> the query, turned and rotated; the key, turned and rotated, and the value as it is go to
    their slots, or nowhere where that is -1.

    query [num_tokens, num_heads, size], key, value [num_tokens, num_kv_heads, size], cos, sin
    [num_tokens, 1, size], size a power of two; key_slabs, value_slabs [num_slabs, num_kv_heads,
    32 * size] uint8, changed in place; key_slots, value_slots [num_tokens] int64, none twice.
    """
    _store(key_slabs, rotated(turned(key, cos, sin)), key_slots)
    _store(value_slabs, value, value_slots)
    return rotated(turned(query, cos, sin)).to(query.dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, num_heads, size], cos, sin [num_tokens, 1, size] -> like x, float32."""
    first, second = x.float().chunk(2, dim=-1)
    return x.float() * cos.float() + torch.cat((-second, first), dim=-1) * sin.float()


def _store(slabs: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor) -> None:
    """Into slabs of bfloat16: [token, head, channel]."""
    has_slot = slots >= 0
    stored = slabs.view(torch.bfloat16).view(-1, *tokens.shape[1:])
    stored.index_copy_(0, slots[has_slot], tokens[has_slot].to(torch.bfloat16))
