"""Entry point of the op."""

import torch

from kernels.kv_append import reference


def kv_append(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Token i goes to slot `slot_mapping[i]` = block * block_size + offset.

    key, value [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads,
    head_dim], changed in place; slot_mapping [num_tokens] int64, no slot twice.
    """
    assert key.shape == value.shape, (key.shape, value.shape)
    assert key.shape[0] == slot_mapping.shape[0], (key.shape, slot_mapping.shape)
    assert key_cache.shape[2:] == key.shape[1:], (key_cache.shape, key.shape)
    assert key_cache.is_contiguous(), "a flattened copy would swallow the write"
    assert value_cache.is_contiguous(), "a flattened copy would swallow the write"
    reference.kv_append(key, value, key_cache, value_cache, slot_mapping)
