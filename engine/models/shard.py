"""The part of a model that one rank of a tensor-parallel group holds.

Heads, the inner dimension of the MLP and the vocabulary are cut: the matrices that lead there by
rows, those that lead back by columns, so that a layer needs two sums over the ranks. Norms are
whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.heads import refuse_uneven_heads
from engine.models.model_config import ModelConfig
from engine.ranks.group import Ranks


@dataclass(frozen=True, slots=True)
class Span:
    """Elements [start, stop) of a dimension of `total` elements, in `size` places.

    Where `total` does not divide, the places beyond `stop - start` hold zeros, so that all ranks
    have tensors of one shape: a zero row of an up projection meets a zero column of the down one.
    """

    start: int
    stop: int
    total: int
    size: int

    @property
    def num_held(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.num_held == self.total == self.size

    def times(self, factor: int) -> Span:
        """The span of vectors of `factor` elements each, laid end to end."""
        return Span(
            self.start * factor, self.stop * factor, self.total * factor, self.size * factor
        )


def whole(total: int) -> Span:
    return Span(0, total, total, total)


def even_span(total: int, rank: int, size: int) -> Span:
    width = -(-total // size)
    start = min(rank * width, total)
    return Span(start, min(start + width, total), total, width)


def kv_head_span(num_kv_heads: int, rank: int, size: int) -> Span:
    """Of several ranks on one KV head, each holds a copy of it."""
    if size <= num_kv_heads:
        return even_span(num_kv_heads, rank, size)
    head = rank * num_kv_heads // size
    return Span(head, head + 1, num_kv_heads, 1)


@dataclass(frozen=True, slots=True)
class Shard:
    """`local` is the model as the rank computes it: its own heads and inner dimension.

    Spans: `query` and `key_value` count rows of the projections, `inner` of gate and up,
    `vocabulary` of the embedding and the output matrix.
    """

    local: ModelConfig
    query: Span
    key_value: Span
    inner: Span
    vocabulary: Span


def shard_of(config: ModelConfig, ranks: Ranks) -> Shard:
    """Raises UnsupportedModel when the heads cannot be dealt out to so many ranks."""
    refuse_uneven_heads(config.num_heads, config.num_kv_heads, ranks.size)
    heads = even_span(config.num_heads, ranks.rank, ranks.size)
    kv_heads = kv_head_span(config.num_kv_heads, ranks.rank, ranks.size)
    inner = even_span(config.intermediate_size, ranks.rank, ranks.size)
    return Shard(
        local=replace(
            config,
            num_heads=heads.size,
            num_kv_heads=kv_heads.size,
            intermediate_size=inner.size,
        ),
        query=heads.times(config.head_dim),
        key_value=kv_heads.times(config.head_dim),
        inner=inner,
        vocabulary=even_span(config.vocab_size, ranks.rank, ranks.size),
    )
