"""Chunks of prompts over a paged cache of which all that they must not read is poison."""

from collections.abc import Sequence

import torch

from tests.kernels.contexts import normal, paged


def starts_of(query_lens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)


def chunks(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    window: int | None = None,
) -> tuple[object, ...]:
    """Arguments of paged_prefill; heads: of queries, of keys."""
    contexts = paged(context_lens, heads[1], head_dim, dtype=dtype)
    query = normal(sum(query_lens), heads[0], head_dim, dtype=dtype)
    longest = max(query_lens, default=0)
    return query, starts_of(query_lens), *contexts, scale, window, longest
