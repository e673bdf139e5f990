"""Mutants of tiered_append."""

import torch

from kernels.errors import (
    ContractError,
    DeviceAssertion,
    DoubleStore,
    OutOfBounds,
    Uninitialised,
)
from kernels.tiered_append.reference import tiered_append
from tests.kernels.appended_tokens import Appended, appended
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, far_rows


def of_far_rows() -> Appended:
    query, key, value = far_rows(3, 2**30, 192, torch.bfloat16)[:, None].split(64, dim=2)
    return appended(3, 1, 1, 64)._replace(query=query, key=key, value=value)


def of_strides_of_their_own() -> Appended:
    arguments = appended(3, 5, 2, 64)
    alone = (arguments.query.contiguous(), arguments.value.contiguous())
    return arguments._replace(query=alone[0], value=alone[1])


OP = Op(
    "tiered_append",
    "tiered_append",
    tiered_append,
    {
        "strides": of_strides_of_their_own,
        "many heads": lambda: appended(2, 19, 17, 64),
        "wide heads": lambda: appended(3, 3, 9, 128),
        "far rows": of_far_rows,
    },
)
QUERY_HEADS = "head = group * HEADS + tl.arange"
KV_HEADS = "head = (group - query_groups) * HEADS + tl.arange"
MUTANTS = {
    OP: [
        Mutant(
            "a slot that is none",
            "mask=mask & (key_slot >= 0)",
            "mask=mask",
            OutOfBounds,
            "before its first element",
        ),
        Mutant(
            "the other's slot", "mask & (value_slot >= 0)", "mask & (key_slot >= 0)", OutOfBounds
        ),
        Mutant("query heads past the last", "head < heads", "head <= heads", DoubleStore, "of out"),
        Mutant("KV heads past the last", "head < kv_heads", "head <= kv_heads", OutOfBounds),
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
            OutOfBounds,
            "of query",
        ),
        Mutant(
            "strides of the key for the value's",
            "token * value_token_stride + head * value_head_stride",
            "token * key_token_stride + head * key_head_stride",
            OutOfBounds,
            "of value",
        ),
        Mutant("half of a turn", "sin_ptr + token * SIZE", "sin_ptr + token * HALF", DIFFERS),
        Mutant("turned the other way", "first_cos - second", "first_cos + second", DIFFERS),
        Mutant(
            "one half's cosines",
            "tl.load(cos_ptr + HALF + column)",
            "tl.load(cos_ptr + column)",
            DIFFERS,
        ),
        Mutant("a step too few", "log2_of(HALF)", "log2_of(HALF) - 1", DIFFERS),
        Mutant(
            "sums where they were",
            "tl.join(first + second, first - second).permute(0, 2, 1).reshape(2 * HEADS, HALF)\n"
            "    return",
            "tl.join(first + second, first - second).reshape(2 * HEADS, HALF)\n    return",
            DIFFERS,
        ),
        Mutant("not normalised", " * SIZE**-0.5", " * HALF**-0.5", DIFFERS),
        Mutant(
            "rounded before it is rotated",
            "x.reshape(HEADS, SIZE) *",
            "x.to(tl.bfloat16).to(tl.float32).reshape(HEADS, SIZE) *",
            DIFFERS,
        ),
        Mutant(
            "rows of one half",
            "(token * heads + head) * SIZE",
            "(token * heads + head) * HALF",
            DoubleStore,
        ),
        Mutant(
            "a slot without its heads",
            "(key_slot * kv_heads + head)",
            "(key_slot + head)",
            DIFFERS,
        ),
        Mutant(
            "heads before tokens, as in packed slabs",
            "(value_slot * kv_heads + head) * SIZE",
            "((value_slot // 16 * kv_heads + head) * 16 + value_slot % 16) * SIZE",
            DIFFERS,
        ),
        Mutant(
            "heads of the query in a slot",
            "(value_slot * kv_heads + head)",
            "(value_slot * heads + head)",
            OutOfBounds,
        ),
        Mutant(
            "every token in one slot",
            "(key_slot * kv_heads + head) * SIZE",
            "head * SIZE",
            DoubleStore,
        ),
        Mutant(
            "the key where the value is",
            "tl.store(stored, values,",
            "tl.store(stored, keys,",
            DIFFERS,
        ),
        Mutant(
            "values into the slabs of keys",
            "value_slabs_ptr.to(",
            "key_slabs_ptr.to(",
            DIFFERS,
        ),
        Mutant(
            "a smaller arena",
            "slot // SLAB < num_slabs",
            "slot // SLAB < num_slabs // 2",
            DeviceAssertion,
            "a slot beyond the arena",
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
            "arenas swapped",
            "slabs = (key_slabs, value_slabs,",
            "slabs = (value_slabs, key_slabs,",
            DIFFERS,
            "",
            "api",
        ),
        Mutant(
            "slots swapped",
            "key_slots, value_slots)\n    if",
            "value_slots, key_slots)\n    if",
            DIFFERS,
            "",
            "api",
        ),
        Mutant(
            "key and value swapped",
            "arguments = (query, key, value,",
            "arguments = (query, value, key,",
            ContractError,
            "key_token_stride must be 128",
            "api",
        ),
        Mutant(
            "one arena twice",
            "slabs = (key_slabs, value_slabs,",
            "slabs = (key_slabs, key_slabs,",
            ContractError,
            "key_slabs must be apart from value_slabs",
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
