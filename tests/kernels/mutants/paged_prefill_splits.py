"""Mutants of paged_prefill where several programs share the keys of a row."""

from typing import Any

import torch

from kernels.errors import DeviceAssertion, DoubleStore, StoredInput, Uninitialised
from kernels.paged_prefill.reference import paged_prefill
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op
from tests.kernels.paged_chunks import chunks
from tests.kernels.tolerances import ATTENTION, ROUNDINGS


def many_splits() -> tuple[Any, ...]:
    """So many that they are merged in two steps, and the greatest score is in the second."""
    query, starts, key_cache, *others = chunks([1], [9300], (1, 1))
    key_cache[others[1][0, 145]] *= 9
    return query, starts, key_cache, *others


OP = Op(
    "paged_prefill",
    "paged_prefill",
    paged_prefill,
    {
        "three splits, of which one context has one": lambda: chunks([3, 2], [3100, 5]),
        "a window": lambda: chunks([20], [3100], (2, 1), window=2500),
        "wide heads": lambda: chunks([1], [2100], (1, 1), 130, scale=0.1),
        "many splits": many_splits,
    },
    rtol=ROUNDINGS[torch.float16],
    atol=ATTENTION[torch.float32],
)
MERGE = "paged_prefill_merge_kernel"
MUTANTS = {
    OP: [
        Mutant(
            "a share too small",
            "tl.cdiv(end - begin, splits)",
            "(end - begin) // splits",
            DIFFERS,
        ),
        Mutant("all from the first", "begin += split * share", "begin += 0", DIFFERS),
        Mutant("all to the last", "tl.minimum(begin + share, end)", "end", DIFFERS),
        Mutant("whole from the first", "tl.minimum(tl.maximum(whole, begin), end)", "0", DIFFERS),
        Mutant(
            "whole to the last",
            "tl.minimum(tl.maximum(whole, begin), end)",
            "tl.maximum(whole, begin)",
            DIFFERS,
        ),
        Mutant(
            "the block of a tile past the last",
            "block_of(table, tl.minimum(begin, end - 1)",
            "block_of(table, begin",
            DeviceAssertion,
            "a block beyond the cache",
        ),
        Mutant(
            "splits of other heads",
            "split = kv_head // kv_heads",
            "split = kv_head // splits",
            DoubleStore,
        ),
        Mutant("all splits in one place", " * splits + split\n    is", "\n    is", DoubleStore),
        Mutant("a division by nothing", "total == 0", "total < 0", DIFFERS),
        Mutant("a sum without its scale", "peak + tl.log2(total)", "tl.log2(total)", DIFFERS),
        Mutant("a scale without its sum", "peak + tl.log2(total)", "peak", DIFFERS),
        Mutant(
            "what sees nothing weighs",
            'tl.where(sees_none, float("-inf"), peak',
            "tl.where(sees_none, 0.0, peak",
            DIFFERS,
        ),
        Mutant(
            "weight of no split",
            'mask=split < splits, other=float("-inf")',
            "mask=split < splits, other=0.0",
            DIFFERS,
        ),
        Mutant("one step", "range(0, splits, SPLITS)", "range(0, 1, SPLITS)", DIFFERS),
        Mutant("a merge that does not fade", "merged * fading", "merged", DIFFERS, within=MERGE),
        Mutant("a sum that does not fade", "total * fading", "total", DIFFERS, within=MERGE),
        Mutant("a merge without division", "merged / total", "merged", DIFFERS),
        Mutant(
            "the first columns",
            "tl.program_id(1) * COLUMNS + tl.arange",
            "tl.arange",
            DoubleStore,
        ),
        Mutant(
            "a merge past the last column",
            "merged, mask=columns < size",
            "merged, mask=columns <= size",
            DoubleStore,
        ),
        Mutant(
            "a merge into what it merges",
            "tl.store(out_ptr + row * size",
            "tl.store(partial_ptr + row * size",
            StoredInput,
        ),
        Mutant(
            "one split",
            "(splits * kv_heads, tiles, chunks)",
            "(kv_heads, tiles, chunks)",
            Uninitialised,
            "of partial were never stored",
            "api",
        ),
        Mutant(
            "rows of one head",
            "(num_tokens * num_heads, cdiv",
            "(num_tokens, cdiv",
            Uninitialised,
            "of out were never stored",
            "api",
        ),
        Mutant(
            "columns of one program",
            'cdiv(head_dim, merge["COLUMNS"])',
            "1",
            Uninitialised,
            "of out were never stored",
            "api",
        ),
    ]
}
