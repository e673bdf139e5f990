"""Mutants of tiered_decode where a sequence has several queries."""

from typing import Any

import torch

from kernels.errors import ContractError, DoubleStore, OutOfBounds, Uninitialised
from kernels.tiered_decode import reference
from kernels.tiered_plan.reference import FORMATS, Formats, tiered_plan
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op
from tests.kernels.slab_caches import slab_cache, tokens_of

# Of tokens that are hidden in the hot tier's last slab, in its last two, or in the sink; of a
# sequence shorter than its queries; and of tokens of which the first query sees none.
BOUNDS = torch.tensor(
    [[64, 128, 192, 212], [0, 0, 0, 17], [64, 64, 64, 65], [0, 0, 0, 2], [0, 64, 64, 67]]
).int()
FORMAT = FORMATS[0]


def case(num_runs: int, query_len: int, num_heads: int, num_kv_heads: int) -> tuple[Any, ...]:
    """Of queries between others in memory."""
    cache = slab_cache(BOUNDS, num_kv_heads, 64, FORMAT)
    tokens = tokens_of(query_len * (num_heads + 1), len(BOUNDS), 64, seed=5)
    query = tokens.view(len(BOUNDS), query_len, num_heads + 1, 64)[:, :, 1:]
    plan = tiered_plan(BOUNDS, num_runs, FORMAT)
    return query, cache.slabs, *cache[1:3], plan, FORMAT, 0.125


def expected(
    query: torch.Tensor,
    slabs: reference.Slabs,
    key_tables: torch.Tensor,
    value_tables: torch.Tensor,
    plan: torch.Tensor,
    formats: Formats,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tables = key_tables, value_tables, BOUNDS
    out, lse = reference.tiered_decode(query, slabs, *tables, formats, scale)
    return out.to(query.dtype), lse.float()


OP = Op(
    "tiered_decode",
    "tiered_decode",
    expected,
    {
        "few": lambda: case(3, 4, 4, 2),
        "many": lambda: case(40, 3, 3, 1),
    },
    rtol=2**-8,
    atol=4e-3,
)
SWAPPED = "(query_ptr, query_stride, query_head_stride)"
MUTANTS = {
    OP: [
        Mutant(
            "a token after a query's own",
            "num_tokens - QUERY_LEN + 1",
            "num_tokens - QUERY_LEN + 2",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "a query's own token hidden",
            "num_tokens - QUERY_LEN + 1",
            "num_tokens - QUERY_LEN",
            DIFFERS,
            file="tiers",
        ),
        Mutant("nothing hidden", "+ nth_query", "+ 3", DIFFERS, file="tiers"),
        Mutant(
            "hidden by heads",
            "tl.arange(0, ROWS)) % QUERY_LEN",
            "tl.arange(0, ROWS)) // QUERY_LEN",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "hidden from the first query on",
            "num_tokens - QUERY_LEN + 1 + nth_query",
            "num_tokens - nth_query",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "hidden in the hot tier alone",
            "place[None, :] < first_hidden[:, None]",
            "(place[None, :] < first_hidden[:, None]) | (slab < sink_slabs)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "hidden in the last slab alone",
            "place[None, :] < first_hidden[:, None]",
            "(place[None, :] < first_hidden[:, None]) | (slab + 1 < last)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "heads for queries",
            "row // QUERY_LEN * head_stride + row % QUERY_LEN * query_stride",
            "row % QUERY_LEN * head_stride + row // QUERY_LEN * query_stride",
            OutOfBounds,
            "load of query",
            file="tiles",
        ),
        Mutant(
            "all queries the first one",
            "row // QUERY_LEN * head_stride + row % QUERY_LEN * query_stride",
            "row // QUERY_LEN * head_stride",
            DoubleStore,
            "store of partial",
            file="tiles",
        ),
        Mutant(
            "plain queries in the order of heads",
            "load_query(queries, rows, first_row, SIZE // PARTS",
            f"load_query({SWAPPED}, rows, first_row, SIZE // PARTS",
            OutOfBounds,
            "load of query",
        ),
        Mutant(
            "halves of queries in the order of heads",
            "load_query(queries, rows, first_row, WIDTH",
            f"load_query({SWAPPED}, rows, first_row, WIDTH",
            OutOfBounds,
            "load of query",
        ),
        Mutant(
            "queries that are not loaded",
            "(row < rows)[:, None]",
            "(row < rows // QUERY_LEN)[:, None]",
            DIFFERS,
            file="tiles",
        ),
        Mutant(
            "results of another query",
            "place_of_row(row, 1, heads, QUERY_LEN)",
            "place_of_row(row, heads, 1, QUERY_LEN)",
            DoubleStore,
            "store of partial",
        ),
        Mutant(
            "results of heads alone",
            "is_row = tl.broadcast_to((row < rows)",
            "is_row = tl.broadcast_to((row < rows // QUERY_LEN)",
            DIFFERS,
        ),
        Mutant(
            "a record's results over another's",
            "(run + row) * QUERY_LEN",
            "(run + row)",
            DoubleStore,
        ),
        Mutant(
            "nothing seen, of which there is no weight",
            "tl.full((ROWS,), LEAST, tl.float32)",
            'tl.full((ROWS,), float("-inf"), tl.float32)',
            DIFFERS,
            file="tiles",
        ),
        Mutant(
            "a merge of nothing seen",
            "tl.full((1,), LEAST, tl.float32)",
            'tl.full((1,), float("-inf"), tl.float32)',
            DIFFERS,
        ),
        Mutant("a merge of no weight", "(total != 0)", "(num_runs > 0)", DIFFERS),
        Mutant(
            "swapped strides",
            "sizes, scale, query_stride",
            "sizes, scale, head_stride",
            ContractError,
            file="api",
        ),
        Mutant(
            "a merge of one query",
            "(num_sequences * num_queries,",
            "(num_sequences * num_queries // 4,",
            Uninitialised,
            "out were never stored",
            file="api",
        ),
        Mutant(
            "one query a record",
            "new_empty(num_records, query_len * num_heads, size",
            "new_empty(num_records, num_heads, size",
            OutOfBounds,
            "store of partial",
            file="api",
        ),
    ],
}
