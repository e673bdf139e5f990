"""Entry point of the op."""

import torch

from kernels.errors import ContractError
from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.tiered_append import reference

_launch = Launcher(reference.CONTRACT, "kernels.tiered_append.kernel:tiered_append_kernel")


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """-> the query, turned and rotated, in `out` if that is given, contiguous. Token i's key,
    turned and rotated, and its value, which comes rotated, go to slots `key_slots[i]` and
    `value_slots[i]`, each slab * 16 + offset, of slabs of bfloat16, or nowhere where that is -1
    (padding up to the size of a CUDA graph).

    query [num_tokens, num_heads, size], key, value [num_tokens, num_kv_heads, size] bfloat16: any
    strides but the last, so views of one fused projection; cos, sin [num_tokens, 1, size];
    key_slabs, value_slabs [num_slabs, num_kv_heads, 32 * size] uint8, changed in place; slots
    [num_tokens] int64, none twice. On a GPU size is 64, 128 or 256, or ContractError. Bitwise batch
    invariant: what a slot holds, and a query, depend on their own token alone.
    """
    num_tokens, num_heads, size = query.shape
    num_kv_heads = key.shape[1]
    assert key.shape == value.shape, (key.shape, value.shape)
    assert cos.shape == sin.shape == (num_tokens, 1, size), (query.shape, cos.shape, sin.shape)
    assert key_slabs.shape[1:] == value_slabs.shape[1:] == (num_kv_heads, 32 * size)
    slabs = (key_slabs, value_slabs, key_slots, value_slots)
    if not runs_kernels(query):
        result = reference.tiered_append(query, key, value, cos, sin, *slabs)
        return result if out is None else out.copy_(result)
    meta = next((each for each in reference.METAS if each["SIZE"] == size), None)
    if meta is None:
        expected = f"of heads of {' or '.join(map(str, reference.SIZES))}"
        raise ContractError("tiered_append", "query", expected, f"{size}")
    if out is None:
        out = query.new_empty(query.shape)
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2])
    sizes = (len(key_slabs), len(value_slabs), num_heads, num_kv_heads)
    groups = cdiv(num_heads, meta["HEADS"]) + cdiv(num_kv_heads, meta["HEADS"])
    arguments = (query, key, value, cos, sin, *slabs, out, *strides, *sizes)
    _launch((num_tokens * groups,), *arguments, **meta)
    return out
