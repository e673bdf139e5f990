"""The specification: element i of the first half turns with element i of the second.

Rounding, as in Hugging Face's: x * cos is rounded to the dtype, then the other half times sin is
added in fp32, and the sum is rounded to the dtype. (The products of narrow dtypes are exact in
fp32; of float32, torch may fuse the second one into the addition, the kernel does not.)
"""

import torch

from kernels.contract import FLOATS, Contract, Count, Output, Size, Stride, Tensor

CONTRACT = Contract(
    "rotary",
    x=Tensor("tokens heads 2*half", FLOATS, layout="rows", wide_index=True),
    cos=Tensor("tokens 1 2*half", like="x", wide_index=True),
    sin=Tensor("tokens 1 2*half", like="x", wide_index=True),
    out=Output("tokens heads 2*half", like="x", wide_index=True),
    x_token_stride=Stride("x", 0),
    x_head_stride=Stride("x", 1),
    heads=Count("heads"),
    half=Size("half"),
)
# A program turns HEADS heads of one token. Half a head lies within HALF.
METAS = (
    {"HEADS": 8, "HALF": 64, "num_warps": 4},
    {"HEADS": 4, "HALF": 128, "num_warps": 4},
)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, num_heads, head_dim], cos and sin [num_tokens, 1, head_dim] -> like x."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-second, first), dim=-1), sin)
