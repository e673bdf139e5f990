"""Entry point of the op."""

import torch

from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.metas import narrowest
from kernels.rotary import reference

_launch = Launcher(reference.CONTRACT, "kernels.rotary.kernel:rotary_kernel")


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, num_heads, head_dim], cos and sin [num_tokens, 1, head_dim] -> like x.

    head_dim <= 256 on a GPU. Bitwise batch invariant: a pair of elements depends on itself, its
    cosines and its sines alone.
    """
    assert x.dim() == 3, x.shape
    assert x.shape[2] % 2 == 0, x.shape
    assert cos.shape == sin.shape == (x.shape[0], 1, x.shape[2]), (x.shape, cos.shape, sin.shape)
    if not runs_kernels(x):
        return reference.rotary(x, cos, sin)
    num_tokens, num_heads, head_dim = x.shape
    out = x.new_empty(x.shape)
    arguments = (x, cos, sin, out, x.stride(0), x.stride(1), num_heads, head_dim // 2)
    meta = narrowest(reference.CONTRACT, reference.METAS, "HALF", "half", arguments)
    _launch((num_tokens * cdiv(num_heads, meta["HEADS"]),), *arguments, **meta)
    return out
