"""The specification: the lightest blocks, as many as weigh no more than a budget together.

A block's share is what it weighs over what a head attended to; of a KV head the greatest of its
queries'. Skipped are all blocks of a share of at most 2^t, for the greatest t at which the skipped
shares of no query add up to more than the budget: between the budget over the number of blocks,
where they surely do not, and the budget, found by halving. Nothing depends on that choice but how
much is read: `tiered_skip` certifies what it then skips, whatever it is.
"""

import math

import torch

from kernels.contract import Contract, Count, Output, Scalar, Tensor
from kernels.tiered_decode.reference import rows_of
from kernels.tiered_plan.reference import SERVED_FORMATS, Formats
from kernels.tiered_skip.reference import num_cold_of

CONTRACT = Contract(
    "skip_list",
    masses=Tensor("rows kv_heads blocks group", torch.float32, wide_index=True),
    lse=Tensor("rows heads", torch.float32),
    bounds=Tensor("sequences 4", torch.int32),
    skips=Output("rows kv_heads blocks", torch.int32, wide_index=True),
    sequences=Count("sequences"),
    kv_heads=Count("kv_heads"),
    blocks=Count("blocks"),
    group=Count("group"),
    budget=Scalar(float, 0.0),
)
NUM_HALVINGS = 8  # of the logarithm of the number of blocks: of 512 to 0.035, to base 2
# Shares of BLOCKS blocks stay in registers, or of FEW, if there are no more; others come in tiles.
FEW_ROWS = 4
META_OF_FEW = {"BLOCKS": 512, "TILE": 128, "FEW": 128, "num_warps": 1}
META_OF_MANY = {"BLOCKS": 512, "TILE": 128, "FEW": 0, "num_warps": 4}


def meta_of(formats: Formats, group: int) -> dict[str, int]:
    """What the kernel is launched with. Raises ContractError."""
    rows = min(rows_of(group), 1 << (group - 1).bit_length())
    form = {"VALUE_BITS": formats.value_bits, "ROWS": rows}
    return form | (META_OF_FEW if rows <= FEW_ROWS else META_OF_MANY)


SERVED_METAS = [meta_of(SERVED_FORMATS, group) for group in (4, 8)]


def skip_list(
    masses: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    formats: Formats,
    budget: float,
) -> torch.Tensor:
    """masses [num_rows, num_kv_heads, blocks, group], logarithms to base 2, and lse [num_rows,
    num_kv_heads * group], natural ones, of `tiered_skip`; bounds [num_sequences, 4] of that step:
    rows are those of its sequences, for one layer after another -> skips [num_rows, num_kv_heads,
    blocks] int32."""
    num_rows, num_kv_heads, blocks, group = masses.shape
    num_cold = torch.tensor([num_cold_of(each, formats) for each in bounds.tolist()])
    num_cold = num_cold.repeat(num_rows // max(1, len(bounds))).to(masses.device)
    is_block = torch.arange(blocks, device=masses.device) < num_cold[:, None, None]
    is_block = is_block.expand(num_rows, num_kv_heads, blocks)
    sums = lse.double().view(num_rows, num_kv_heads, 1, group) / math.log(2)
    shares = (masses.double() - sums).masked_fill(~is_block[..., None], float("-inf"))
    greatest = shares.amax(-1)
    high = torch.full_like(greatest[..., :1], budget).log2()
    low = high - num_cold.clamp(min=1).log2()[:, None, None]
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        chosen = shares.exp2().masked_fill((greatest > middle)[..., None], 0.0)
        fits = (chosen.sum(2) <= budget).all(-1, keepdim=True)
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return ((greatest <= low) & is_block).int()
