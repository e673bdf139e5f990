"""Entry point of the op."""

import torch

from kernels.kv_append import reference
from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.metas import narrowest

_launch = Launcher(reference.CONTRACT, "kernels.kv_append.kernel:kv_append_kernel")
_launch_rope = Launcher(reference.ROPE_CONTRACT, "kernels.kv_append.kernel:kv_append_rope_kernel")


def kv_append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> None:
    """Token i goes to slot `slot_mapping[i]` = block * block_size + offset, or nowhere if it is -1
    (padding up to the size of a CUDA graph).

    key, value [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads,
    head_dim], changed in place; slot_mapping [num_tokens] int64, no slot twice. cos, sin
    [num_tokens, 1, head_dim], both or none: the key is turned on its way. head_dim <= 256 on a
    GPU. Bitwise batch invariant: what a slot holds depends on its own token alone.
    """
    assert key.shape == value.shape, (key.shape, value.shape)
    assert key.shape[0] == slot_mapping.shape[0], (key.shape, slot_mapping.shape)
    assert key_cache.shape[2:] == key.shape[1:], (key_cache.shape, key.shape)
    assert key_cache.is_contiguous(), "a flattened copy would swallow the write"
    assert value_cache.is_contiguous(), "a flattened copy would swallow the write"
    assert (cos is None) == (sin is None), "both cosines and sines, or none"
    if not runs_kernels(key):
        reference.kv_append(key, value, key_cache, value_cache, slot_mapping, cos, sin)
        return
    num_tokens, heads, head_dim = key.shape
    scalars = (*key.stride()[:2], *value.stride()[:2], *key_cache.shape[:2], heads)
    caches = (key_cache, value_cache, slot_mapping)
    if cos is None:
        arguments = (key, value, *caches, *scalars, head_dim)
        meta = narrowest(reference.CONTRACT, reference.METAS, "BLOCK", "size", arguments)
        _launch((num_tokens * cdiv(heads, meta["HEADS"]),), *arguments, **meta)
    else:
        arguments = (key, value, cos, sin, *caches, *scalars, head_dim // 2)
        meta = narrowest(reference.ROPE_CONTRACT, reference.ROPE_METAS, "HALF", "half", arguments)
        _launch_rope((num_tokens * cdiv(heads, meta["HEADS"]),), *arguments, **meta)
