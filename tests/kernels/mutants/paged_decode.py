"""Mutants of paged_decode."""

from typing import Any

from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    OutOfBounds,
    StoredInput,
    Uninitialised,
)
from kernels.paged_decode.reference import paged_decode_lse
from tests.kernels.contexts import normal, paged
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op


def many_splits() -> tuple[Any, ...]:
    """So many that they are merged in two steps, and the greatest score is in the second."""
    key_cache, value_cache, tables, lengths = paged([64 * 65 + 1], 1, 16)
    key_cache[tables[0, 65]] *= 9
    return normal(1, 1, 16), key_cache, value_cache, tables, lengths, 0.3


OP = Op(
    "paged_decode",
    "paged_decode_lse",
    paged_decode_lse,
    {
        "unequal lengths": lambda: (normal(3, 6, 48), *paged([200, 0, 64], 2, 48), 0.2),
        "a window": lambda: (normal(2, 2, 16), *paged([150, 40], 1, 16), 0.3, 75),
        "a large group": lambda: (normal(1, 36, 16), *paged([20], 2, 16), 0.3),
        "wide heads": lambda: (normal(1, 2, 144), *paged([70], 1, 144), 0.1),
        "part of a projection": lambda: (normal(2, 8, 16)[:, 2:4], *paged([70, 65], 1, 16), 0.3),
        "many splits": many_splits,
        "one split": lambda: (normal(50, 2, 16), *paged([70, 0, 1] * 16 + [64, 2], 2, 16), 0.2),
    },
    rtol=2e-6,
    atol=2e-6,
)
VALUE = "value_cache_ptr + tile_start + in_cache, mask=is_loaded"
MUTANTS = {
    OP: [
        Mutant(
            "a window before the start",
            "tl.maximum(context_len - window, 0)",
            "(context_len - window)",
            OutOfBounds,
            "load of block_tables",
        ),
        Mutant("whole tiles only", "tl.cdiv(context_len, tile)", "context_len // tile", DIFFERS),
        Mutant(
            "a tile past the last",
            "tl.cdiv(context_len, tile)",
            "context_len // tile + 1",
            DeviceAssertion,
            "a block beyond the cache",
        ),
        Mutant("a token too many", "position < context_len)", "position <= context_len)", DIFFERS),
        Mutant(
            "a window of one less",
            "position >= context_len - window",
            "position > context_len - window",
            DIFFERS,
        ),
        Mutant(
            "a window that the mask forgets",
            "(position >= context_len - window) & (position < context_len)",
            "position < context_len",
            DIFFERS,
        ),
        Mutant("stale values", VALUE, VALUE.replace("is_loaded", "is_column"), DIFFERS),
        Mutant(
            "columns past the last",
            "is_seen[:, None] & is_column",
            "is_seen[:, None] & (columns <= size)[None, :]",
            OutOfBounds,
            "load of value_cache",
        ),
        Mutant("undefined values", VALUE + ", other=0.0", VALUE, DIFFERS),
        Mutant(
            "scores that are not hidden",
            '        scores = tl.where(is_seen[None, :], scores, float("-inf"))\n',
            "",
            DIFFERS,
        ),
        Mutant(
            "a sum that is not rescaled",
            "total * shrink + tl.sum(prob",
            "total + tl.sum(prob",
            DIFFERS,
        ),
        Mutant("values that are not rescaled", "attended * shrink[:, None]", "attended", DIFFERS),
        Mutant("base e for base 2", "(scale * LOG2_E)", "scale", DIFFERS),
        Mutant(
            "always the first block",
            "tl.load(table + tile // tiles_per_block)",
            "tl.load(table)",
            DIFFERS,
        ),
        Mutant("start of its block", "tile % tiles_per_block * TILE", "0", DIFFERS),
        Mutant(
            "the first KV head",
            "token_stride + kv_head * size + col",
            "token_stride + col",
            DIFFERS,
        ),
        Mutant("heads of one KV head", "kv_head * group + in_group", "in_group", DoubleStore),
        Mutant(
            "one part of a group",
            "tl.program_id(0) % parts * ROWS + tl",
            "tl",
            DoubleStore,
        ),
        Mutant(
            "a table of another width",
            "sequence * max_blocks",
            "sequence * (max_blocks - 1)",
            DeviceAssertion,
            "a block beyond the cache",
        ),
        Mutant(
            "strides swapped",
            "sequence * query_sequence_stride + columns[None, :]",
            "sequence * query_head_stride + columns[None, :]",
            DIFFERS,
        ),
        Mutant(
            "rows past the group",
            "tl.store(partial_lse_ptr + place, lse, mask=is_head)",
            "tl.store(partial_lse_ptr + place, lse, mask=in_group < ROWS)",
            OutOfBounds,
            "store of partial_lse",
        ),
        Mutant(
            "all splits in one place",
            "* splits + split\n",
            "* splits\n",
            DoubleStore,
            within="paged_decode_kernel",
        ),
        Mutant("sums not divided", "attended / total[:, None]", "attended", DIFFERS),
        Mutant(
            "a whole context is not stored",
            "if not has_tiles:\n        if is_whole:",
            "if not has_tiles:\n        if splits == 0:",
            DIFFERS,
        ),
        Mutant(
            "a part taken for the whole",
            "is_whole = splits == 1",
            "is_whole = splits >= 1",
            OutOfBounds,
        ),
        Mutant("base 2 for base e of a whole context", "lse * LN_2, mask", "lse, mask", DIFFERS),
        Mutant(
            "partial results into the cache",
            "tl.store(partial_lse_ptr + place",
            "tl.store(key_cache_ptr + place",
            StoredInput,
        ),
        Mutant(
            "weight of no split",
            'mask=split < num_splits, other=float("-inf")',
            "mask=split < num_splits, other=0.0",
            DIFFERS,
        ),
        Mutant(
            "the last split",
            "num_splits = tl.cdiv(last - first, tiles)",
            "num_splits = (last - first) // tiles",
            DIFFERS,
            within="paged_decode_merge_kernel",
        ),
        Mutant(
            "a merge that is not rescaled",
            "merged * shrink",
            "merged",
            DIFFERS,
            within="paged_decode_merge_kernel",
        ),
        Mutant(
            "no context",
            "tl.where((columns >= 0) & (num_splits > 0), merged / total, 0.0)",
            "merged / total",
            DIFFERS,
        ),
        Mutant("base 2 for base e", "tl.log2(total)) * LN_2", "tl.log2(total))", DIFFERS),
        Mutant("everyone stores the sum", "== 0\n", ">= 0\n", DoubleStore, "lse"),
        Mutant(
            "half of the rows",
            "num_sequences * heads, cdiv(head_dim",
            "num_sequences * kv_heads, cdiv(head_dim",
            Uninitialised,
            "of out were never stored",
            "api",
        ),
        Mutant(
            "no window",
            "window or reference.ALL_TOKENS",
            "reference.ALL_TOKENS",
            DIFFERS,
            file="api",
        ),
        Mutant(
            "a merge by another tile",
            'head_dim, meta["TILE"], *cut',
            'head_dim, 2 * meta["TILE"], *cut',
            DIFFERS,
            file="api",
        ),
        Mutant(
            "heads for KV heads",
            "sizes = (heads, num_blocks, block_size, kv_heads,",
            "sizes = (kv_heads, num_blocks, block_size, heads,",
            ContractError,
            "heads must be 6, the size heads, came 2",
            "api",
        ),
        Mutant(
            "caches of another dtype",
            "tensors = (query, key_cache, value_cache,",
            "tensors = (query, key_cache, value_cache.half(),",
            ContractError,
            "value_cache must be float32 like query",
            "api",
        ),
    ]
}
