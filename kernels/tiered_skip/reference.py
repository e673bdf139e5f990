"""The specification: attention to all blocks of a cache but some cold ones, whose values are not
read and whose keys are; and a certificate of what that makes of the result.

With L the logarithm of the sum of exponentials over what was attended to, and T that over the
skipped blocks, the share of the softmax that was skipped is sigmoid(T - L), and the result is off
by at most that times (V + |result|), V the length of the longest skipped value. Kernels know both
sums within what `rounding` proves: their T is raised by twice that, and so are the blocks' masses,
whose sums it is. Where the share may be more than epsilon for one query of a KV head, that head
attends after all to those of its skipped blocks that are heavier than a limit: the greatest at
which the others are no more than epsilon for any query, found by halving from where they surely are
not. Of more than PART blocks, each part of so many has a limit of its own, for its share of
epsilon.
"""

import math

import torch

from kernels.contract import (
    FLOATS,
    Argument,
    Contract,
    Count,
    InOut,
    Output,
    Scalar,
    Stride,
    Tensor,
)
from kernels.errors import ContractError
from kernels.tiered_decode.reference import (
    SERVED_GRAINS,
    SERVED_SIZE,
    STAGES,
    Slabs,
    dequantised,
    rows_of,
)
from kernels.tiered_plan.reference import SERVED_FORMATS, WARM_BITS, Formats
from kernels.tiered_skip.rounding import SUM_ERROR

TENSORS: dict[str, Argument] = {
    "query": Tensor("sequences heads size", torch.bfloat16, layout="rows", wide_index=True),
    "key_slabs": Tensor("key_slots key_grain kv_heads 32*size", torch.uint8, wide_index=True),
    "value_slabs": Tensor("value_slots value_grain kv_heads 32*size", torch.uint8, wide_index=True),
    "key_meta": Tensor("key_slots kv_heads 2 size", torch.float16, wide_index=True),
    "value_meta": Tensor("value_slots kv_heads 2 64", torch.float16, wide_index=True),
    "key_tables": Tensor("sequences max_key_slabs", torch.int32, wide_index=True),
    "value_tables": Tensor("sequences max_value_slabs", torch.int32, wide_index=True),
    "plan": Tensor("records 16", torch.int32),
    "skips": Tensor("sequences kv_heads blocks", torch.int32),
}
SCALARS: dict[str, Argument] = {
    "query_sequence_stride": Stride("query", 0),
    "query_head_stride": Stride("query", 1),
    "sequences": Count("sequences"),
    "heads": Count("heads"),
    "key_slots": Count("key_slots"),
    "value_slots": Count("value_slots"),
    "kv_heads": Count("kv_heads"),
    "max_key_slabs": Count("max_key_slabs"),
    "max_value_slabs": Count("max_value_slabs"),
    "records": Count("records"),
    "blocks": Count("blocks"),
    "scale": Scalar(float, 0.0),
}
# Sums: logarithms to base 2 of what was attended to, then of what was skipped.
CONTRACT = Contract(
    "tiered_skip",
    **TENSORS,
    reach=Tensor("sequences kv_heads", torch.float32, align=4),
    masses=InOut("sequences kv_heads blocks group", torch.float32),
    partial=InOut("records heads size", torch.float32, wide_index=True),
    partial_sums=InOut("2 records heads", torch.float32),
    **SCALARS,
)
AGAIN_CONTRACT = Contract(
    "tiered_skip_again",
    **TENSORS,
    masses=Tensor("sequences kv_heads blocks group", torch.float32),
    partial_sums=Tensor("2 records heads", torch.float32),
    left_out=InOut("sequences kv_heads blocks", torch.int32),
    again=InOut("records heads size", torch.float32, wide_index=True),
    again_sums=InOut("2 records heads", torch.float32),
    **SCALARS,
    most=Scalar(float),
)
MERGE_CONTRACT = Contract(
    "tiered_skip_merge",
    partial=Tensor("records heads size", torch.float32, wide_index=True),
    partial_sums=Tensor("2 records heads", torch.float32),
    again=Tensor("records heads size", torch.float32, wide_index=True),
    again_sums=Tensor("2 records heads", torch.float32),
    plan=Tensor("records 16", torch.int32),
    out=Output("sequences heads size", FLOATS, wide_index=True),
    lse=Output("sequences heads", torch.float32, align=4),
    skipped=Output("sequences heads", torch.float32, align=4),
    records=Count("records"),
    sequences=Count("sequences"),
    heads=Count("heads"),
)
SIZES = (64, 128)
MARGIN = 2.0**-9  # for rounded sums, to base 2: of so much less than epsilon limits are found
NUM_HALVINGS = 8
PART = 512  # blocks for which a limit is found
TILE = 32  # blocks that a program looks at together, whether to read them again
SUMS = 64  # of runs, that a program merges at a time
MERGE_META = {"COLUMNS": 64, "SPLITS": 8, "num_warps": 1}
SERVED_MERGE_META = MERGE_META | {"SIZE": SERVED_SIZE}


def meta_of(formats: Formats, grains: tuple[int, int], size: int, group: int) -> dict[str, int]:
    """What the kernel is launched with, and again. Raises ContractError."""
    if size not in SIZES:
        expected = f"of heads of {' or '.join(map(str, SIZES))}"
        raise ContractError("tiered_skip", "query", expected, f"{size}")
    bits = {"KEY_BITS": formats.key_bits, "VALUE_BITS": formats.value_bits}
    slots = {"KEY_GRAIN": grains[0], "VALUE_GRAIN": grains[1]}
    form = {"SIZE": size, "ROWS": rows_of(group, 1, size)}
    return bits | slots | form | {"STAGES": STAGES[formats], "num_warps": 1}


def again_meta_of(meta: dict[str, int]) -> dict[str, int]:
    return meta | {"SUMS": SUMS, "PART": PART, "TILE": TILE}


SERVED_META = meta_of(SERVED_FORMATS, SERVED_GRAINS, SERVED_SIZE, 8)


def most_of(epsilon: float) -> float:
    """What the logarithm to base 2 of skipped over attended to may be: sigmoid(that) is epsilon.
    Raises ContractError."""
    if not 0 <= epsilon < 1:
        raise ContractError("tiered_skip", "epsilon", "from 0 on and below 1", f"{epsilon}")
    return math.log2(epsilon / (1 - epsilon)) if epsilon else float("-inf")


def num_cold_of(bounds: list[int], formats: Formats) -> int:
    """Blocks of which values can be skipped: those of the cold format."""
    sink, cold, warm, _ = bounds
    return ((warm if formats.value_bits == WARM_BITS else cold) - sink) // 64


def tiered_skip(
    query: torch.Tensor,
    slabs: Slabs,
    key_tables: torch.Tensor,
    value_tables: torch.Tensor,
    bounds: torch.Tensor,
    formats: Formats,
    scale: float,
    skips: torch.Tensor,
    masses: torch.Tensor,
    left_out: torch.Tensor,
    reach: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [num_sequences, num_heads, size], skips [num_sequences, num_kv_heads, blocks], reach
    [num_sequences, num_kv_heads] -> attended, float64 as the query, the logarithm of the sum of
    exponentials over what was attended to, and that over what was skipped, raised, both float64
    [num_sequences, num_heads]. masses [num_sequences, num_kv_heads, blocks, group] takes those of
    cold blocks, logarithms to base 2, raised; left_out, as skips, zero for each block that was read
    after all."""
    num_kv_heads, size = slabs.key_meta.shape[1], slabs.key_meta.shape[3]
    out = query.new_zeros(query.shape, dtype=torch.float64)
    lse = query.new_full(query.shape[:-1], float("-inf"), dtype=torch.float64)
    skipped = lse.clone()
    for row, each in enumerate(bounds.tolist()):
        num_cold = num_cold_of(each, formats)
        if each[3] == 0:
            continue
        queries = query[row].double().view(num_kv_heads, -1, size)
        keys = dequantised(slabs, key_tables[row], each, formats, is_keys=True)
        values = dequantised(slabs, value_tables[row], each, formats, is_keys=False)
        scores = torch.einsum("kgd,ktd->kgt", queries, keys) * scale
        raised = 2 * (queries.norm(dim=-1) * scale * reach[row, :, None] + SUM_ERROR)
        cold = scores[..., each[0] : each[0] + 64 * num_cold].unflatten(-1, (num_cold, 64))
        found = cold.logsumexp(-1) + raised[..., None]
        masses[row, :, :num_cold] = (found / math.log(2)).transpose(1, 2).float()
        is_skipped = skips[row, :, :num_cold].bool()
        seen = _unskipped(scores, each[0], is_skipped)
        is_again = _too_heavy(found - seen.logsumexp(-1, keepdim=True), is_skipped, epsilon)
        left_out[row, :, :num_cold].masked_fill_(is_again, 0)
        is_skipped = is_skipped & ~is_again
        seen = _unskipped(scores, each[0], is_skipped)
        left = found.masked_fill(~is_skipped[:, None], float("-inf")).logsumexp(-1)
        attended = torch.einsum("kgt,ktd->kgd", seen.softmax(-1).nan_to_num(), values)
        out[row], lse[row] = attended.flatten(0, 1), seen.logsumexp(-1).flatten()
        skipped[row] = left.flatten()
    return out, lse, skipped


def _unskipped(scores: torch.Tensor, sink: int, is_skipped: torch.Tensor) -> torch.Tensor:
    """scores [num_kv_heads, group, length] with -inf in skipped blocks."""
    is_seen = torch.ones_like(scores[:, 0], dtype=torch.bool)
    num_cold = is_skipped.shape[1]
    is_seen[:, sink : sink + 64 * num_cold] = ~is_skipped.repeat_interleave(64, 1)
    return scores.masked_fill(~is_seen[:, None], float("-inf"))


def _too_heavy(shares: torch.Tensor, is_skipped: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Which of the skipped blocks are attended to after all, [num_kv_heads, blocks]. shares:
    natural logarithms of blocks' masses over what each query attended to."""
    weights = shares.exp().masked_fill(~is_skipped[:, None], 0.0)
    most = epsilon / (1 - epsilon)
    is_too_much = (weights.sum(-1) > most).any(-1)
    allowed = most * 2**-MARGIN / max(1, weights.shape[-1])  # a block
    greatest = weights.amax(1)
    is_light = [
        each.log2() <= _limit(part, each.log2(), allowed)[:, None]
        for part, each in zip(weights.split(PART, -1), greatest.split(PART, -1), strict=True)
    ]
    return is_skipped & ~torch.cat(is_light, -1) & is_too_much[:, None]


def _limit(weights: torch.Tensor, shares: torch.Tensor, allowed: float) -> torch.Tensor:
    """Of a part of the blocks: [num_kv_heads], as shares, [num_kv_heads, blocks], the logarithms of
    the greatest of a block's weights. allowed: of weights a block."""
    num_kv_heads, group, num_blocks = weights.shape
    safe = weights.new_full((num_kv_heads,), allowed).log2()
    limit = safe + math.log2(max(1, num_blocks))

    def fits(nth: int, limit: torch.Tensor) -> torch.Tensor:
        is_light = shares <= limit[:, None]
        return weights[:, nth].masked_fill(~is_light, 0.0).sum(-1) <= allowed * num_blocks

    for nth in range(group):
        is_found = fits(nth, limit)
        low, high = safe, limit
        for _ in range(NUM_HALVINGS):
            middle = (low + high) / 2
            is_less = fits(nth, middle)
            low, high = torch.where(is_less, middle, low), torch.where(is_less, high, middle)
        limit = torch.where(is_found, limit, low)
    return limit
