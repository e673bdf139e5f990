"""Entry point of the op."""

import torch

from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.metas import narrowest
from kernels.rope_append import reference

_launch = Launcher(reference.CONTRACT, "kernels.rope_append.kernel:rope_append_kernel")


def rope_append(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """-> the turned query, in `out` if that is given, contiguous. Token i's turned key and its
    value go to slot `slot_mapping[i]` = block * block_size + offset, or nowhere if it is -1
    (padding up to the size of a CUDA graph).

    query [num_tokens, num_heads, head_dim], key, value [num_tokens, num_kv_heads, head_dim]: any
    strides but the last, so views of one fused projection; cos, sin [num_tokens, 1, head_dim];
    caches [num_blocks, block_size, num_kv_heads, head_dim], changed in place; slot_mapping
    [num_tokens] int64, no slot twice. head_dim <= 256 on a GPU. Bitwise batch invariant: what a
    slot holds, and a turned query, depend on their own token alone.
    """
    num_tokens, num_heads, head_dim = query.shape
    assert head_dim % 2 == 0, query.shape
    assert key.shape == value.shape, (key.shape, value.shape)
    assert cos.shape == sin.shape == (num_tokens, 1, head_dim), (query.shape, cos.shape, sin.shape)
    assert num_tokens == key.shape[0] == slot_mapping.shape[0], (query.shape, key.shape)
    assert key_cache.shape[2:] == key.shape[1:], (key_cache.shape, key.shape)
    assert key_cache.is_contiguous(), "a flattened copy would swallow the write"
    assert value_cache.is_contiguous(), "a flattened copy would swallow the write"
    caches = (key_cache, value_cache, slot_mapping)
    if not runs_kernels(query):
        turned = reference.rope_append(query, key, value, cos, sin, *caches)
        return turned if out is None else out.copy_(turned)
    num_kv_heads = key.shape[1]
    if out is None:
        out = query.new_empty(query.shape)
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
    sizes = (*key_cache.shape[:2], num_heads, num_kv_heads, head_dim // 2)
    arguments = (query, key, value, cos, sin, *caches, out, *strides, *sizes)
    meta = narrowest(reference.CONTRACT, reference.METAS, "HALF", "half", arguments)
    groups = cdiv(num_heads, meta["HEADS"]) + cdiv(num_kv_heads, meta["HEADS"])
    _launch((num_tokens * groups,), *arguments, **meta)
    return out
