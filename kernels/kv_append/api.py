"""Entry point of the op."""

import torch

from kernels.kv_append import reference
from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.metas import narrowest

_launch = Launcher(reference.CONTRACT, "kernels.kv_append.kernel:kv_append_kernel")


def kv_append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Token i goes to slot `slot_mapping[i]` = block * block_size + offset, or nowhere if it is -1
    (padding up to the size of a CUDA graph).

    key, value [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads,
    head_dim], changed in place; slot_mapping [num_tokens] int64, no slot twice. head_dim <= 256
    on a GPU. Bitwise batch invariant: what a slot holds depends on its own token alone.
    """
    assert key.shape == value.shape, (key.shape, value.shape)
    assert key.shape[0] == slot_mapping.shape[0], (key.shape, slot_mapping.shape)
    assert key_cache.shape[2:] == key.shape[1:], (key_cache.shape, key.shape)
    assert key_cache.is_contiguous(), "a flattened copy would swallow the write"
    assert value_cache.is_contiguous(), "a flattened copy would swallow the write"
    if not runs_kernels(key):
        reference.kv_append(key, value, key_cache, value_cache, slot_mapping)
        return
    num_tokens, heads, head_dim = key.shape
    strides = (*key.stride()[:2], *value.stride()[:2])
    caches, sizes = (key_cache, value_cache), (*key_cache.shape[:2], heads, head_dim)
    arguments = (key, value, *caches, slot_mapping, *strides, *sizes)
    meta = narrowest(reference.CONTRACT, reference.METAS, "BLOCK", "size", arguments)
    _launch((num_tokens * cdiv(heads, meta["HEADS"]),), *arguments, **meta)
