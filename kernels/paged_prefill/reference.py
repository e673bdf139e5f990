"""The specification: softmax and both products in fp32, the result rounded once. (The kernel rounds
the weights of the values to the dtype, for the tensor cores, before it divides by their sum.)"""

import torch

from kernels.contract import (
    FLOATS,
    Argument,
    Contract,
    Count,
    Output,
    Scalar,
    Size,
    Stride,
    Tensor,
)

BLOCK_SIZE = 64
INT32_MAX = 2**31 - 1
CACHE = f"blocks {BLOCK_SIZE} kv_heads size"
INPUTS: dict[str, Argument] = {
    "query": Tensor("tokens heads size", FLOATS, layout="rows", wide_index=True),
    "query_starts": Tensor("bounds", torch.int32, align=4),
    "key_cache": Tensor(CACHE, like="query", wide_index=True),
    "value_cache": Tensor(CACHE, like="query", wide_index=True),
    "block_tables": Tensor("sequences max_blocks", torch.int64, align=8),
    "context_lens": Tensor("sequences", torch.int64, align=8),
}
SCALARS: dict[str, Argument] = {
    "query_token_stride": Stride("query", 0),
    "query_head_stride": Stride("query", 1),
    "size": Size("size"),
    "blocks": Count("blocks"),
    "kv_heads": Count("kv_heads"),
    "max_blocks": Count("max_blocks"),
    "group": Scalar(int, low=1),
    "window": Scalar(int, low=1, high=INT32_MAX),
    "scale": Scalar(float, low=torch.finfo(torch.float32).tiny),
}
PARTIAL, PARTIAL_LSE = "tokens heads splits size", "tokens heads splits"
CONTRACT = Contract(
    "paged_prefill",
    **INPUTS,
    out=Output("tokens heads size", like="query", wide_index=True),
    **SCALARS,
)
SPLIT_CONTRACT = Contract(
    "paged_prefill_split",
    **INPUTS,
    partial=Output(PARTIAL, torch.float32, wide_index=True),
    partial_lse=Output(PARTIAL_LSE, torch.float32, wide_index=True),
    **SCALARS,
    splits=Count("splits"),
)
MERGE_CONTRACT = Contract(
    "paged_prefill_merge",
    partial=Tensor(PARTIAL, torch.float32, wide_index=True),
    partial_lse=Tensor(PARTIAL_LSE, torch.float32, wide_index=True),
    out=Output("tokens heads size", FLOATS, wide_index=True),
    splits=Count("splits"),
    size=Size("size"),
)
# A program attends with ROWS rows, TOKENS keys at a time; a head lies within BLOCK. Rows and keys
# do not depend on the launch, so that the bits of a row do not.
METAS = tuple(
    {"ROWS": rows, "BLOCK": block, "TOKENS": tokens, "num_warps": warps, "num_stages": stages}
    for rows, block, tokens, warps, stages in (
        (128, 64, 64, 4, 3),
        (64, 128, 64, 4, 3),
        (64, 256, 32, 4, 3),
    )
)
# Without tensor cores, which would round the operands.
FLOAT32_METAS = tuple(
    {"ROWS": 32, "BLOCK": block, "TOKENS": 32, "num_warps": 4, "num_stages": 1}
    for block in (64, 128, 256)
)
# A program merges COLUMNS of one head of one token, SPLITS partial results at a time.
MERGE_META = {"COLUMNS": 128, "SPLITS": 8, "num_warps": 1}


def paged_prefill(
    query: torch.Tensor,
    query_starts: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    max_query_len: int | None = None,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """query [num_tokens, num_heads, head_dim] -> like query; as `kernels.paged_prefill.api`.
    deterministic: row by row, for libraries choose by the shape of a product how they sum."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    starts = query_starts.tolist()
    for sequence, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        table = block_tables[sequence, : -(-context_len // BLOCK_SIZE)]
        keys, values = (
            cache[table].flatten(0, 1)[:context_len].float() for cache in (key_cache, value_cache)
        )
        step = 1 if deterministic else max(1, len(query[rows]))
        for start in range(rows.start, rows.stop, step):
            end = start + step
            seen = context_len - (rows.stop - end)
            chunk = query[start:end].float()
            out[start:end] = _attend(chunk, keys[:seen], values[:seen], scale, window)
    return out


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """query [query_len, num_heads, head_dim], the last tokens of the context; keys and values
    [context_len, num_kv_heads, head_dim]."""
    query_len, context_len = len(query), len(keys)
    grouped = query.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * scale
    places = torch.arange(context_len, device=keys.device)
    ahead = places - places[context_len - query_len :, None]
    hidden = ahead > 0
    if window is not None:
        hidden |= ahead <= -window
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
