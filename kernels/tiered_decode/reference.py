"""The specification: a cache of several formats, dequantised, then attention in float64.

The kernel rounds each scaled query and each weight to float16 before they meet their codes (of
bfloat16 slabs: a weight to 16 bits): an error of some 2^-11 of the mean size of keys and values.
"""

from typing import NamedTuple

import torch

from kernels.contract import FLOATS, Contract, Count, InOut, Output, Scalar, Stride, Tensor
from kernels.errors import ContractError
from kernels.kv_quantise.grains import grain_of
from kernels.kv_quantise.layout import SLAB_TOKENS, slabs_of_block
from kernels.kv_quantise.reference import Packed, dequantised_keys, dequantised_values
from kernels.launch import cdiv
from kernels.tiered_plan.reference import SERVED_FORMATS, TOKEN_BITS, WARM_BITS, Formats

CONTRACT = Contract(
    "tiered_decode",
    query=Tensor("sequences query_len heads size", torch.bfloat16, layout="rows", wide_index=True),
    key_slabs=Tensor("key_slots key_grain kv_heads 32*size", torch.uint8, wide_index=True),
    value_slabs=Tensor("value_slots value_grain kv_heads 32*size", torch.uint8, wide_index=True),
    key_meta=Tensor("key_slots kv_heads 2 size", torch.float16, wide_index=True),
    value_meta=Tensor("value_slots kv_heads 2 64", torch.float16, wide_index=True),
    key_tables=Tensor("sequences max_key_slabs", torch.int32, wide_index=True),
    value_tables=Tensor("sequences max_value_slabs", torch.int32, wide_index=True),
    plan=Tensor("records 16", torch.int32),
    partial=InOut("records queries size", torch.float32, wide_index=True),
    partial_lse=InOut("records queries", torch.float32),
    query_sequence_stride=Stride("query", 0),
    query_head_stride=Stride("query", 2),
    sequences=Count("sequences"),
    heads=Count("heads"),
    key_slots=Count("key_slots"),
    value_slots=Count("value_slots"),
    kv_heads=Count("kv_heads"),
    max_key_slabs=Count("max_key_slabs"),
    max_value_slabs=Count("max_value_slabs"),
    records=Count("records"),
    scale=Scalar(float, 0.0),
    query_stride=Stride("query", 1),
)
MERGE_CONTRACT = Contract(
    "tiered_decode_merge",
    partial=Tensor("records queries size", torch.float32, wide_index=True),
    partial_lse=Tensor("records queries", torch.float32),
    plan=Tensor("records 16", torch.int32),
    out=Output("sequences queries size", FLOATS, wide_index=True),
    lse=Output("sequences queries", torch.float32),
    records=Count("records"),
    sequences=Count("sequences"),
    queries=Count("queries"),
)
# One warp a program: nothing then crosses warps. Each of an SM's four parts has registers for two
# programs, of 169 to 255 a thread; only the host's plan knows that. Measured on an H200: five
# stages where a block is of 4 bits, for two blocks are under way then; three of 8 bits, whose
# blocks are twice as large.
STAGES = {(4, 4): 5, (8, 4): 3, (8, 8): 3}
SIZES = (64, 128, 256)
SERVED_SIZE = 128  # of the models that want tiers
PROGRAMS_PER_SM = 8
ROWS = (8, 16)  # queries of one KV head: of its query heads, of each the last QUERY_LEN tokens
MAX_QUERY_LEN = 4
# Of 256 channels a program's registers hold 8 queries, and 16 are two programs; blocks of any
# format are so large that one under way is enough, and an SM's shared memory has room for six.
WIDE = 256
WIDE_STAGES = 3
WIDE_PROGRAMS_PER_SM = 6
# A program merges COLUMNS of one head, SPLITS partial results at a time: of few splits there are
# many heads, and of many few. On an H200 eight at a time are as fast as any others up to 17 splits.
FEW_SPLITS = 32
MERGE_META_OF_FEW = {"COLUMNS": 64, "SPLITS": 8, "num_warps": 1}
MERGE_META_OF_MANY = {"COLUMNS": 32, "SPLITS": 128, "num_warps": 4}
SERVED_MERGE_METAS = [
    meta | {"SIZE": SERVED_SIZE} for meta in (MERGE_META_OF_FEW, MERGE_META_OF_MANY)
]


class Slabs(NamedTuple):
    """The arenas of keys and of values, [num_slabs, kv_heads, 32 * size] uint8, and the metadata of
    their slabs, [num_slots, kv_heads, 2, size] and [num_slots, kv_heads, 2, 64] float16.

    Each arena has its own grain, num_slabs / num_slots: 1, or 2 where no block is of 4 bits. Where
    it is 2, a block of 8 bits is slabs 2g and 2g + 1, with slot g for both, and a table has the two
    side by side.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_meta: torch.Tensor
    value_meta: torch.Tensor


def rows_of(group: int, query_len: int = 1, size: int = SERVED_SIZE) -> int:
    """How many queries of one KV head, of its `group` of query heads, a program takes. Raises
    ContractError."""
    if not 1 <= query_len <= MAX_QUERY_LEN:
        expected = f"of 1 to {MAX_QUERY_LEN} tokens a sequence"
        raise ContractError("tiered_decode", "query", expected, f"{query_len}")
    if group * query_len > ROWS[-1]:
        expected = f"of at most {ROWS[-1] // query_len} heads a KV head"
        if query_len > 1:
            expected += f", of {query_len} tokens a sequence"
        raise ContractError("tiered_decode", "query", expected, f"{group}")
    return next(rows for rows in ROWS if group * query_len <= rows or size == WIDE)


def programs_of(group: int, query_len: int = 1, size: int = SERVED_SIZE) -> int:
    """How many programs take the queries of one KV head. Raises ContractError."""
    return cdiv(group * query_len, rows_of(group, query_len, size))


def meta_of(
    formats: Formats, grains: tuple[int, int], size: int, group: int, query_len: int = 1
) -> dict[str, int]:
    """What the kernel is launched with. grains: of the arenas of keys and of values."""
    bits = {"KEY_BITS": formats.key_bits, "VALUE_BITS": formats.value_bits}
    slots = {"KEY_GRAIN": grains[0], "VALUE_GRAIN": grains[1]}
    rows = rows_of(group, query_len, size)
    form = {"SIZE": size, "ROWS": rows, "QUERY_LEN": query_len}
    programs = {
        "PROGRAMS": cdiv(group * query_len, rows),
        "STAGES": WIDE_STAGES if size == WIDE else STAGES[formats],
        "num_warps": 1,
    }
    return bits | slots | form | programs


# Of groups of up to 8 heads of the usual size; others are compiled when they come.
SERVED_GRAINS = slabs_of_block(SERVED_FORMATS.key_bits), slabs_of_block(SERVED_FORMATS.value_bits)
SERVED_META = meta_of(SERVED_FORMATS, SERVED_GRAINS, SERVED_SIZE, ROWS[0])


def tiered_decode(
    query: torch.Tensor,
    slabs: Slabs,
    key_tables: torch.Tensor,
    value_tables: torch.Tensor,
    bounds: torch.Tensor,
    formats: Formats,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [num_sequences, num_heads, size], or [num_sequences, query_len, num_heads, size] of the
    last tokens of each sequence -> attended, float64 as it, and the logarithm of the sum of
    exponentials of each head's scores, float64 as it without its last dimension. A query sees its
    own token and those before it; one that has none, of a sequence of fewer tokens than query_len,
    gives zeros and -inf."""
    num_kv_heads, size = slabs.key_meta.shape[1], slabs.key_meta.shape[3]
    out = query.new_zeros(query.shape, dtype=torch.float64)
    lse = query.new_full(query.shape[:-1], float("-inf"), dtype=torch.float64)
    for row, each in enumerate(bounds.tolist()):
        queries = query[row].double().view(-1, num_kv_heads, query.shape[-2] // num_kv_heads, size)
        positions = torch.arange(each[3] - len(queries), each[3])
        is_any = positions >= 0
        if not is_any.any():
            continue
        keys = dequantised(slabs, key_tables[row], each, formats, is_keys=True)
        values = dequantised(slabs, value_tables[row], each, formats, is_keys=False)
        scores = torch.einsum("qkgd,ktd->qkgt", queries[is_any], keys) * scale
        is_hidden = torch.arange(each[3]) > positions[is_any, None, None, None]
        scores = scores.masked_fill(is_hidden.to(scores.device), float("-inf"))
        attended = torch.einsum("qkgt,ktd->qkgd", scores.softmax(-1), values)
        out[row].view_as(queries)[is_any] = attended
        lse[row].view(queries.shape[:-1])[is_any] = scores.logsumexp(-1)
    return out, lse


def dequantised(
    slabs: Slabs, table: torch.Tensor, bounds: list[int], formats: Formats, *, is_keys: bool
) -> torch.Tensor:
    """The keys or the values of one sequence, [kv_heads, length, size] float64."""
    sink, cold, warm, length = bounds
    bits = formats.key_bits if is_keys else formats.value_bits
    parts, at = [], 0
    for num_tokens, each_bits in (
        (sink, TOKEN_BITS),
        (cold - sink, bits),
        (warm - cold, WARM_BITS),
        (length - warm, TOKEN_BITS),
    ):
        num_slabs = cdiv(num_tokens, SLAB_TOKENS[each_bits])
        chosen = table[at : at + num_slabs].long()
        part = _of_format(slabs, chosen, each_bits, is_keys=is_keys)
        parts.append(part[:, :num_tokens])
        at += num_slabs
    return torch.cat(parts, 1)


def _of_format(slabs: Slabs, chosen: torch.Tensor, bits: int, *, is_keys: bool) -> torch.Tensor:
    """[kv_heads, tokens, size] float64."""
    num_kv_heads, size = slabs.key_meta.shape[1], slabs.key_meta.shape[3]
    arena, meta = (slabs.keys, slabs.key_meta) if is_keys else (slabs.values, slabs.value_meta)
    if bits == TOKEN_BITS:
        tokens = arena[chosen].view(torch.bfloat16).view(-1, num_kv_heads, size)
        return tokens.transpose(0, 1).double()
    blocks, grain = chosen.view(-1, slabs_of_block(bits)), grain_of(arena, meta)
    slots = blocks[:, ::grain] // grain
    packed = Packed(arena[blocks].movedim(2, 0), meta[slots].movedim(2, 0))
    dequantised_blocks = dequantised_keys if is_keys else dequantised_values
    return dequantised_blocks(packed, bits).flatten(1, 2)
