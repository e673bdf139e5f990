"""Mutants of paged_prefill."""

from typing import Any

import torch

from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    OutOfBounds,
    StoredInput,
    Uninitialised,
)
from kernels.paged_prefill.reference import paged_prefill
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, far_rows
from tests.kernels.paged_chunks import chunks
from tests.kernels.tolerances import ATTENTION, ROUNDINGS


def heads_of_a_fused_matrix() -> tuple[Any, ...]:
    query, *others = chunks([5], [70])
    fused = torch.zeros(5, 7, 16)
    fused[:, 1:5] = query
    return fused[:, 1:5], *others


def far_tokens() -> tuple[Any, ...]:
    _, *others = chunks([3], [3], heads=(1, 1), head_dim=16, dtype=torch.float16)
    return far_rows(3, 2**30, 16, torch.float16)[:, None], *others


OP = Op(
    "paged_prefill",
    "paged_prefill",
    paged_prefill,
    {
        "two chunks": lambda: chunks([5, 9], [70, 9]),
        "two tiles of rows": lambda: chunks([20, 3], [84, 3]),
        "a block that is full": lambda: chunks([3], [64]),
        "two blocks of keys": lambda: chunks([50], [150]),
        "a window": lambda: chunks([5], [150], window=70),
        "an odd head": lambda: chunks([3], [5], head_dim=9),
        "heads of a fused matrix": heads_of_a_fused_matrix,
        "far tokens": far_tokens,
    },
    rtol=ROUNDINGS[torch.float16],
    atol=ATTENTION[torch.float32],
)
NEXT = "block = block_of(table, tl.minimum(tile + 1, end - 1), blocks, TOKENS)\n"
MUTANTS = {
    OP: [
        Mutant("what follows is seen", "hidden = ahead > 0", "hidden = ahead > 1", DIFFERS),
        Mutant("itself is hidden", "hidden = ahead > 0", "hidden = ahead >= 0", DIFFERS),
        Mutant("a window too wide", "(ahead <= -window)", "(ahead < -window)", DIFFERS),
        Mutant(
            "a window that begins too late",
            "tl.maximum(first + 1 - window, 0) // TOKENS",
            "tl.cdiv(tl.maximum(first + 1 - window, 0), TOKENS)",
            DIFFERS,
        ),
        Mutant(
            "a border without a mask",
            "(first + 1) // TOKENS",
            "(first + TOKENS) // TOKENS",
            DIFFERS,
        ),
        Mutant(
            "whole for the last row only", "(first + 1) // TOKENS", "(last + 1) // TOKENS", DIFFERS
        ),
        Mutant("a tile too few", "last // TOKENS + 1", "last // TOKENS", DIFFERS),
        Mutant(
            "a tile too many",
            "last // TOKENS + 1",
            "last // TOKENS + 2",
            DeviceAssertion,
            "a block beyond the cache",
        ),
        Mutant(
            "the block of this turn, before the border",
            NEXT + "        keys =",
            NEXT.replace("tile + 1", "tile") + "        keys =",
            DIFFERS,
        ),
        Mutant(
            "the block of this turn, at the border",
            NEXT + "        ahead =",
            NEXT.replace("tile + 1", "tile") + "        ahead =",
            DIFFERS,
        ),
        Mutant(
            "the block after the last",
            NEXT + "        ahead =",
            NEXT.replace("tl.minimum(tile + 1, end - 1)", "tile + 1") + "        ahead =",
            DeviceAssertion,
            "a block beyond the cache",
        ),
        Mutant(
            "what is stale is loaded",
            "(tile * TOKENS + key <= last)[:, None]",
            "(key >= 0)[:, None]",
            DIFFERS,
        ),
        Mutant(
            "the sum does not fade",
            "total = total * fading +",
            "total = total +",
            DIFFERS,
            within="attend",
        ),
        Mutant(
            "the values do not fade",
            "attended = attended * fading[:, None]",
            "attended = attended",
            DIFFERS,
        ),
        Mutant("powers of two", "scale = scale * LOG2E", "scale = scale * 1.0", DIFFERS),
        Mutant("no division", "attended / total[:, None]", "attended", DIFFERS),
        Mutant(
            "heads of another group",
            "head = kv_head * group + row",
            "head = kv_head + row",
            DoubleStore,
        ),
        Mutant("keys of the first head", " + kv_head * size + columns", " + columns", DIFFERS),
        Mutant(
            "strides swapped",
            "token * query_token_stride + head.to(tl.int64) * query_head_stride",
            "token * query_head_stride + head.to(tl.int64) * query_token_stride",
            DIFFERS,
        ),
        Mutant(
            "int32 tokens",
            "(start + token).to(tl.int64)",
            "start + token",
            DeviceAssertion,
            "int32 overflows in mul",
        ),
        Mutant(
            "columns past the last",
            "is_column = columns < size",
            "is_column = columns <= size",
            DoubleStore,
        ),
        Mutant(
            "rows past the last",
            "tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)",
            "first_row + tl.arange(0, ROWS)",
            OutOfBounds,
            "query",
        ),
        Mutant(
            "positions of the chunk",
            "position = context_len - query_len + token",
            "position = token",
            DIFFERS,
        ),
        Mutant("tables that overlap", "sequence * max_blocks", "sequence", DIFFERS),
        Mutant(
            "blocks of 63 tokens", "return block * PAGE +", "return block * (PAGE - 1) +", DIFFERS
        ),
        Mutant("always the first tile", " + tile * TOKENS % PAGE", "", DIFFERS),
        Mutant(
            "result into the query",
            "tl.store(out_ptr +",
            "tl.store(query_ptr +",
            StoredInput,
            "store into query",
            within="attend_rows",
        ),
        Mutant(
            "whole tiles only",
            'cdiv(longest * group, meta["ROWS"])',
            'longest * group // meta["ROWS"]',
            ContractError,
            "the grid must be of some programs",
            "api",
        ),
        Mutant(
            "tokens for rows",
            "longest * group",
            "longest",
            DeviceAssertion,
            "a chunk longer than max_query_len",
            "api",
        ),
        Mutant(
            "one sequence",
            'meta["ROWS"]), len(context_lens))',
            'meta["ROWS"]), 1)',
            Uninitialised,
            "of out were never stored",
            "api",
        ),
        Mutant(
            "no window", "window or reference.INT32_MAX", "reference.INT32_MAX", DIFFERS, "", "api"
        ),
        Mutant(
            "keys for values",
            "inputs = (query, query_starts, key_cache, value_cache,",
            "inputs = (query, query_starts, key_cache, key_cache,",
            DIFFERS,
            "",
            "api",
        ),
        Mutant(
            "in place",
            "out = torch.empty(query.shape, dtype=query.dtype, device=query.device)",
            "out = query",
            ContractError,
            "out must be apart from query",
            "api",
        ),
        Mutant(
            "a table of 32 bits",
            "key_cache, value_cache, block_tables, context_lens)\n    sizes",
            "key_cache, value_cache, block_tables.int(), context_lens)\n    sizes",
            ContractError,
            "block_tables must be int64, came int32",
            "api",
        ),
    ]
}
