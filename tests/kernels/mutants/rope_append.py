"""Mutants of rope_append."""

import torch

from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    OutOfBounds,
    Uninitialised,
)
from kernels.rope_append.reference import rope_append
from tests.kernels.mutants.kv_append import SLOTS, caches
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, far_rows, normal
from tests.kernels.mutants.rotary import turns

OP = Op(
    "rope_append",
    "rope_append",
    rope_append,
    {
        "odd": lambda: (
            normal(3, 5, 6),
            normal(3, 4, 6)[:, 2:],
            normal(3, 4, 8, seed=1)[:, :2, :6],
            *turns(3, 6),
            *caches(3, 2, 2, 6),
            SLOTS,
        ),
        "many heads": lambda: (
            *normal(2, 37, 8)[..., :6].split((19, 9, 9), dim=1),
            *turns(2, 6),
            *caches(2, 3, 9, 6),
            SLOTS[[0, 2]],
        ),
        "far rows": lambda: (
            *far_rows(3, 2**30, 24, torch.float16)[:, None].split(8, dim=2),
            *turns(3, 8, torch.float16),
            *(each.half() for each in caches(3, 2, 1, 8)),
            SLOTS,
        ),
    },
    rtol=2e-6,
    atol=1e-6,
)
QUERY_HEADS = "head = group * HEADS + tl.arange"
KV_HEADS = "head = (group - query_groups) * HEADS + tl.arange"
MUTANTS = {
    OP: [
        Mutant(
            "a slot that is none",
            "        mask = mask & (slot >= 0)\n",
            "",
            OutOfBounds,
            "before its first element",
        ),
        Mutant("query heads past the last", "head < heads", "head <= heads", DoubleStore, "of out"),
        Mutant("KV heads past the last", "head < kv_heads", "head <= kv_heads", OutOfBounds),
        Mutant("columns past the last", "columns < half", "columns <= half", DoubleStore),
        Mutant(
            "key heads after the query's",
            KV_HEADS,
            KV_HEADS.replace("(group - query_groups)", "group"),
            DIFFERS,
        ),
        Mutant(
            "always the first query heads",
            QUERY_HEADS,
            QUERY_HEADS.replace("group", "0"),
            DoubleStore,
        ),
        Mutant(
            "a group of KV heads as queries",
            "if group < query_groups:",
            "if group <= query_groups:",
            DIFFERS,
        ),
        Mutant(
            "strides of the key for the query's",
            "token * query_token_stride + head * query_head_stride",
            "token * key_token_stride + head * key_head_stride",
            DIFFERS,
        ),
        Mutant(
            "strides of the key for the value's",
            "token * value_token_stride + head * value_head_stride",
            "token * key_token_stride + head * key_head_stride",
            OutOfBounds,
            "of value",
        ),
        Mutant("half of a turn", "sin_ptr + token * 2 * half", "sin_ptr + token * half", DIFFERS),
        Mutant(
            "rows of one half",
            "(token * heads + head) * 2 * half",
            "(token * heads + head) * half",
            DoubleStore,
        ),
        Mutant(
            "halves over each other",
            "tl.store(out + half, second",
            "tl.store(out, second",
            Uninitialised,
        ),
        Mutant(
            "a slot without its heads",
            "(slot * kv_heads + head) * 2",
            "(slot + head) * 2",
            DIFFERS,
        ),
        Mutant(
            "heads of the query in a slot",
            "(slot * kv_heads + head)",
            "(slot * heads + head)",
            OutOfBounds,
        ),
        Mutant(
            "every token in one slot",
            "(slot * kv_heads + head) * 2",
            "head * 2",
            DoubleStore,
        ),
        Mutant(
            "the key where the value is",
            "tl.store(value_cache_ptr + cached, first_value,",
            "tl.store(value_cache_ptr + cached, first,",
            DIFFERS,
        ),
        Mutant(
            "a smaller cache",
            "slot // block_size < blocks",
            "slot // block_size < blocks - 1",
            DeviceAssertion,
            "a slot beyond the cache",
        ),
        Mutant(
            "int32 rows",
            "(tl.program_id(0) // groups).to(tl.int64)",
            "tl.program_id(0) // groups",
            DeviceAssertion,
            "int32 overflows in mul",
        ),
        Mutant(
            "no programs for the KV heads",
            'cdiv(num_heads, meta["HEADS"]) + cdiv(num_kv_heads, meta["HEADS"])',
            'cdiv(num_heads, meta["HEADS"])',
            Uninitialised,
            "",
            "api",
        ),
        Mutant(
            "heads in one count",
            'cdiv(num_heads, meta["HEADS"]) + cdiv(num_kv_heads, meta["HEADS"])',
            'cdiv(num_heads + num_kv_heads, meta["HEADS"])',
            Uninitialised,
            "",
            "api",
        ),
        Mutant(
            "cosines and sines swapped",
            "arguments = (query, key, value, cos, sin,",
            "arguments = (query, key, value, sin, cos,",
            DIFFERS,
            "",
            "api",
        ),
        Mutant(
            "key and value swapped",
            "arguments = (query, key, value,",
            "arguments = (query, value, key,",
            ContractError,
            "key_token_stride must be 32",
            "api",
        ),
        Mutant(
            "head counts swapped",
            "num_heads, num_kv_heads, head_dim // 2)",
            "num_kv_heads, num_heads, head_dim // 2)",
            ContractError,
            "heads must be 5",
            "api",
        ),
        Mutant(
            "one cache twice",
            "caches = (key_cache, value_cache, slot_mapping)",
            "caches = (key_cache, key_cache, slot_mapping)",
            ContractError,
            "key_cache must be apart from value_cache",
            "api",
        ),
        Mutant(
            "in the place of its input",
            "query.new_empty(query.shape)",
            "query",
            ContractError,
            "out must be apart from query",
            "api",
        ),
    ]
}
