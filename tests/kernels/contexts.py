"""Sequences in a paged cache as an attention kernel must take them: blocks in any order, NaN in
every slot that no context holds, table entries past a context that are no blocks."""

from collections.abc import Sequence

import torch

BLOCK_SIZE = 64
NO_BLOCK = 2**40


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def paged(
    context_lens: Sequence[int],
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    num_spare: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Key cache, value cache, block tables and context lengths; `num_spare` entries a table more
    than the longest context needs."""
    num_blocks = [-(-each // BLOCK_SIZE) for each in context_lens]
    total = sum(num_blocks) + 1
    shape = (total, BLOCK_SIZE, num_kv_heads, head_dim)
    caches = [normal(*shape, dtype=dtype, seed=seed + each) for each in (1, 2)]
    is_stale = torch.ones(total, BLOCK_SIZE, dtype=torch.bool)
    tables = torch.full((len(context_lens), max(num_blocks, default=0) + num_spare), NO_BLOCK)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed + 3)).tolist()
    for row, (context_len, needed) in enumerate(zip(context_lens, num_blocks, strict=True)):
        blocks = [order.pop() for _ in range(needed)]
        tables[row, :needed] = torch.tensor(blocks, dtype=torch.int64)
        places = torch.arange(context_len)
        is_stale[tables[row][places // BLOCK_SIZE], places % BLOCK_SIZE] = False
    for cache in caches:
        cache[is_stale] = float("nan")
    return caches[0], caches[1], tables, torch.tensor(context_lens, dtype=torch.int64)


def expected_by_hand(
    query: torch.Tensor,
    caches: Sequence[torch.Tensor],
    table: torch.Tensor,
    context_len: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Of one sequence, head by head and token by token, in float64: [num_heads, head_dim]."""
    group = len(query) // caches[0].shape[2]
    seen = range(0 if window is None else max(0, context_len - window), context_len)
    places = [(int(table[token // BLOCK_SIZE]), token % BLOCK_SIZE) for token in seen]
    attended = torch.zeros(query.shape, dtype=torch.float64)
    for head in range(len(query)):
        keys, values = (
            torch.stack([cache[*place, head // group].double() for place in places])
            for cache in caches
        )
        scores = keys @ query[head].double() * scale
        attended[head] = scores.softmax(0) @ values
    return attended
