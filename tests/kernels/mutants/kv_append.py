"""Mutants of kv_append."""

import torch

from kernels.errors import ContractError, DeviceAssertion, DoubleStore, OutOfBounds
from kernels.kv_append.reference import kv_append
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op, normal


def caches(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(*shape, seed=2), normal(*shape, seed=3)


SLOTS = torch.tensor([3, -1, 5])
OP = Op(
    "kv_append",
    "kv_append",
    kv_append,
    {
        "copied": lambda: (normal(3, 2, 6), normal(3, 4, 6)[:, 2:], *caches(3, 2, 2, 6), SLOTS),
        "many heads": lambda: (
            normal(2, 9, 6),
            normal(2, 9, 6, seed=1),
            *caches(2, 3, 9, 6),
            SLOTS[[0, 2]],
        ),
    },
)
MUTANTS = {
    OP: [
        Mutant(
            "a slot that is none",
            "tl.store(key_cache_ptr + cached, key, mask=mask & (slot >= 0))",
            "tl.store(key_cache_ptr + cached, key, mask=mask)",
            OutOfBounds,
            "before its first element",
        ),
        Mutant(
            "heads past the last",
            "mask = (head < heads) & (columns < size)",
            "mask = (head <= heads) & (columns < size)",
            OutOfBounds,
        ),
        Mutant("columns past the last", "(columns < size)", "(columns <= size)", OutOfBounds),
        Mutant(
            "stride of the other",
            "token * value_token_stride + head * value_head_stride",
            "token * key_token_stride + head * key_head_stride",
            OutOfBounds,
        ),
        Mutant(
            "a slot without its heads",
            "(slot * heads + head) * size",
            "(slot + head) * size",
            DIFFERS,
        ),
        Mutant(
            "every token in one slot",
            "cached = (slot * heads + head) * size + columns",
            "cached = head * size + columns",
            DoubleStore,
        ),
        Mutant(
            "value where key is",
            "tl.store(value_cache_ptr + cached, value,",
            "tl.store(key_cache_ptr + cached, value,",
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
            "block for blocks",
            "*key_cache.shape[:2], heads",
            "*key_cache.shape[1::-1], heads",
            ContractError,
            "blocks must be 3, the size blocks, came 2",
            "api",
        ),
        Mutant(
            "one cache twice",
            "(key_cache, value_cache), (",
            "(key_cache, key_cache), (",
            ContractError,
            "key_cache must be apart from value_cache",
            "api",
        ),
        Mutant(
            "a slot of 32 bits",
            "*caches, slot_mapping,",
            "*caches, slot_mapping.int(),",
            ContractError,
            "slot_mapping must be int64, came int32",
            "api",
        ),
    ]
}
