"""The specification: silu in fp32, rounded to the dtype, then the product, rounded again."""

import torch
import torch.nn.functional as F

from kernels.contract import FLOATS, Contract, Output, Size, Stride, Tensor

CONTRACT = Contract(
    "silu_mul",
    gate_up=Tensor("rows 2*size", FLOATS, layout="rows", wide_index=True),
    out=Output("rows size", like="gate_up", wide_index=True),
    gate_up_stride=Stride("gate_up", 0),
    size=Size("size"),
)
# A product that the L2 cannot hold is streamed past it; a smaller one waits there for its reader.
METAS = tuple({"BLOCK": 2048, "STREAM": each, "num_warps": 8} for each in (0, 1))
STREAMED_BYTES = 32 * 2**20


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [num_tokens, 2 * size], gate first -> silu(gate) * up, [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
