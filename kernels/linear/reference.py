"""The specification: products and sums in float32, the bias too, the result rounded once, or not at
all where it is float32; but on a CPU products of a narrow dtype are always rounded to it."""

import torch
import torch.nn.functional as F

from kernels.contract import FLOATS, Contract, Count, Output, Size, Stride, Tensor

NARROW = (torch.bfloat16, torch.float16)
WEIGHT = Tensor("out_size in_size", like="x", wide_index=True)
GATE_UP = Tensor("2*size in_size", like="x", wide_index=True)
X = Tensor("rows in_size", NARROW, layout="rows", wide_index=True)
ONE_X = Tensor("1 in_size", NARROW, layout="rows")
ONE_ROW_CONTRACT = Contract(
    "linear_one_row",
    x=ONE_X,
    weight=WEIGHT,
    bias=Tensor("out_size", like="x"),
    out=Output("1 out_size", FLOATS),
    out_size=Size("out_size"),
    in_size=Size("in_size"),
)
ONE_ROW_SILU_CONTRACT = Contract(
    "linear_silu_mul_one_row",
    x=ONE_X,
    weight=GATE_UP,
    bias=Tensor("2*size", like="x"),
    out=Output("1 size", like="x"),
    size=Size("size"),
    in_size=Size("in_size"),
)
FEW_ROWS_CONTRACT = Contract(
    "linear_few_rows",
    x=X,
    weight=WEIGHT,
    bias=Tensor("out_size", like="x"),
    out=Output("rows out_size", FLOATS, wide_index=True),
    x_stride=Stride("x", 0),
    rows=Count("rows"),
    out_size=Size("out_size"),
    in_size=Size("in_size"),
)
FEW_ROWS_SILU_CONTRACT = Contract(
    "linear_silu_mul_few_rows",
    x=X,
    weight=GATE_UP,
    bias=Tensor("2*size", like="x"),
    out=Output("rows size", like="x", wide_index=True),
    x_stride=Stride("x", 0),
    rows=Count("rows"),
    size=Size("size"),
    in_size=Size("in_size"),
)
TILED_CONTRACT = Contract(
    "linear_tiled",
    x=Tensor("rows in_size", FLOATS, layout="rows", wide_index=True),
    weight=WEIGHT,
    bias=Tensor("out_size", like="x"),
    out=Output("rows out_size", FLOATS, wide_index=True),
    x_stride=Stride("x", 0),
    rows=Count("rows"),
    out_size=Size("out_size"),
    in_size=Size("in_size"),
)
# What is fastest differs by shape: a model's start-up times them all (`choose_linears`).
ONE_ROW_METAS = tuple(
    {"OUTPUTS": 4, "TILE": 1024, "STAGES": stages, "num_warps": 4} for stages in (4, 6)
)
ONE_ROW_SILU_METAS = ({"OUTPUTS": 4, "TILE": 1024, "STAGES": 3, "num_warps": 4},)
# A turn reads PARTS tiles, a warp each.
FEW_ROWS_METAS = tuple(
    {
        "ROWS": 8,
        "OUTPUTS": 16,
        "TILE": 128,
        "PARTS": parts,
        "num_warps": parts,
        "num_stages": stages,
    }
    for parts, stages in ((4, 3), (2, 4))
)
FEW_ROWS_SILU_METAS = FEW_ROWS_METAS[:1]
TILED_METAS = tuple(
    {"ROWS": rows, "OUTPUTS": 64, "TILE": 128, "num_warps": 4, "num_stages": stages}
    for rows, stages in ((16, 6), (32, 5))
)
TILED_SHARED_BYTES = 122_896  # an L4 has 101,376
# One form for any number of rows: what a row's sum is made of, and in which order, is the same in
# every batch.
MAX_ROWS = 2**31 - 1
FIXED_META = {"ROWS": 64, "OUTPUTS": 64, "TILE": 64, "num_warps": 4, "num_stages": 6}
# Without tensor cores, which would round the operands.
FIXED_FLOAT32_META = {"ROWS": 32, "OUTPUTS": 32, "TILE": 32, "num_warps": 4, "num_stages": 1}


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [num_tokens, in_size], weight [out_size, in_size], bias [out_size] -> [num_tokens, out] of
    out_dtype: float32, or that of x (None)."""
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if not x.is_cuda:
        return F.linear(x, weight, bias).to(out_dtype)
    product = torch.mm(x, weight.T, out_dtype=out_dtype)
    return product if bias is None else product.add_(bias)


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """weight [2 * size, in_size], gates first -> silu(gate) * up, [num_tokens, size]; gate, up and
    silu(gate) are rounded to the dtype, as if by two operations."""
    gate, up = linear(x, weight, bias).chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
