"""The specification: scores, softmax and the sum of values in fp32, the result rounded once.

The kernel rounds each probability to the dtype before it meets its value, as FlashAttention does:
an error of half a step of the dtype of the mean size of the values, whatever the result's own size.
"""

from collections.abc import Mapping

import torch

from kernels.contract import FLOATS, Contract, Count, InOut, Output, Scalar, Size, Stride, Tensor

INT32_MAX = 2**31 - 1
ALL_TOKENS = INT32_MAX  # the window of a query that sees everything
CONTRACT = Contract(
    "paged_decode",
    query=Tensor("sequences heads size", FLOATS, layout="rows", wide_index=True),
    key_cache=Tensor("blocks block_size kv_heads size", like="query", wide_index=True),
    value_cache=Tensor("blocks block_size kv_heads size", like="query", wide_index=True),
    block_tables=Tensor("sequences max_blocks", torch.int64, align=8, wide_index=True),
    context_lens=Tensor("sequences", torch.int64, align=8),
    partial=InOut("sequences heads splits size", torch.float32, wide_index=True),
    partial_lse=InOut("sequences heads splits", torch.float32, wide_index=True),
    out=InOut("sequences heads size", like="query", wide_index=True),
    lse=InOut("sequences heads", torch.float32, wide_index=True),
    query_sequence_stride=Stride("query", 0),
    query_head_stride=Stride("query", 1),
    heads=Count("heads"),
    blocks=Count("blocks"),
    block_size=Count("block_size"),
    kv_heads=Count("kv_heads"),
    max_blocks=Count("max_blocks"),
    size=Size("size"),
    splits=Count("splits"),
    scale=Scalar(float),
    window=Scalar(int, 1, INT32_MAX),
    most_splits=Scalar(int, 1, INT32_MAX),
    min_tiles=Scalar(int, 1, INT32_MAX),
)
MERGE_CONTRACT = Contract(
    "paged_decode_merge",
    partial=Tensor("sequences heads splits size", torch.float32, wide_index=True),
    partial_lse=Tensor("sequences heads splits", torch.float32, wide_index=True),
    context_lens=Tensor("sequences", torch.int64, align=8),
    out=Output("sequences heads size", FLOATS, wide_index=True),
    lse=Output("sequences heads", torch.float32),
    heads=Count("heads"),
    splits=Count("splits"),
    size=Size("size"),
    tile=Scalar(int, 1, INT32_MAX),
    window=Scalar(int, 1, INT32_MAX),
    most_splits=Scalar(int, 1, INT32_MAX),
    min_tiles=Scalar(int, 1, INT32_MAX),
)
ROWS = 16  # query heads of one KV head that a program takes, as few as a matrix product has
# A head lies within one BLOCK; TILE tokens of one block of the cache are staged at a time. One warp
# a program: nothing then crosses warps between the two products of a tile. An SM runs
# programs_per_sm of them at once; only the host's plan knows that. Of 128 channels an SM of an H200
# has room for no more, by their stages: where it had for five, those that started early beside the
# kernel before lay five on some SMs and three on others, and 32 x 8K took 275 us instead of 250.
METAS = (
    {"BLOCK": 64, "TILE": 32, "num_warps": 1, "num_stages": 3, "programs_per_sm": 8},
    {"BLOCK": 128, "TILE": 32, "num_warps": 2, "num_stages": 7, "programs_per_sm": 4},
    {"BLOCK": 256, "TILE": 32, "num_warps": 2, "num_stages": 2, "programs_per_sm": 4},
)
FP32_METAS = (
    {"BLOCK": 128, "TILE": 16, "num_warps": 4, "num_stages": 2, "programs_per_sm": 2},
    {"BLOCK": 256, "TILE": 16, "num_warps": 4, "num_stages": 2, "programs_per_sm": 2},
)
# A program merges COLUMNS of one head, SPLITS partial results at a time: of few splits there are
# many heads, and of many few.
FEW_SPLITS = 8
MERGE_META_OF_FEW = {"COLUMNS": 128, "SPLITS": FEW_SPLITS, "num_warps": 1}
MERGE_META_OF_MANY = {"COLUMNS": 32, "SPLITS": 64, "num_warps": 4}


def launched(meta: Mapping[str, int]) -> dict[str, int]:
    """What of a meta the kernel is launched with."""
    return {name: value for name, value in meta.items() if name != "programs_per_sm"}


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """As `paged_decode_lse`, without the second result."""
    return paged_decode_lse(
        query, key_cache, value_cache, block_tables, context_lens, scale, window
    )[0]


def paged_decode_lse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [num_sequences, num_heads, head_dim] -> like query, and the logarithm of the sum of
    exponentials of each head's scores, [num_sequences, num_heads] fp32.

    caches [num_blocks, block_size, num_kv_heads, head_dim]; block_tables [num_sequences,
    max_num_blocks]; context_lens [num_sequences]: tokens in the cache, of which the query, the last
    of them, sees all or the last `window`. Of none: zeros, and -inf.
    """
    num_kv_heads, head_dim = key_cache.shape[2:]
    out, lse = torch.zeros_like(query), query.new_full(query.shape[:2], float("-inf")).float()
    for row, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            continue
        start = 0 if window is None else max(0, context_len - window)
        blocks = block_tables[row, : -(-context_len // key_cache.shape[1])]
        keys, values = (
            cache[blocks].flatten(0, 1)[start:context_len].float()
            for cache in (key_cache, value_cache)
        )
        grouped = query[row].float().view(num_kv_heads, -1, head_dim)
        scores = torch.einsum("kgd,tkd->kgt", grouped, keys) * scale
        attended = torch.einsum("kgt,tkd->kgd", scores.softmax(-1), values)
        out[row] = attended.view(query.shape[1:]).to(query.dtype)
        lse[row] = scores.logsumexp(-1).flatten()
    return out, lse
