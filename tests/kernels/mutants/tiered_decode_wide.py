"""Mutants of tiered_decode of heads of 256 channels: two parts, and programs of 8 queries."""

from typing import Any

import torch

from kernels.errors import DoubleStore, OutOfBounds
from kernels.tiered_decode import reference
from kernels.tiered_plan.reference import FORMATS, Formats, tiered_plan
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op
from tests.kernels.slab_caches import slab_cache, tokens_of

BOUNDS = torch.tensor([[64, 128, 192, 212], [0, 0, 0, 17]]).int()


def case(formats: Formats, query_len: int, num_heads: int, magnitude: float = 1) -> tuple[Any, ...]:
    """magnitude: of queries, but in their first 64 channels."""
    cache = slab_cache(BOUNDS, 1, 256, formats)
    tokens = tokens_of(query_len, len(BOUNDS), num_heads * 256, seed=5)
    query = tokens.view(len(BOUNDS), query_len, num_heads, 256).clone()
    query[..., 64:] *= magnitude
    plan = tiered_plan(BOUNDS, 3, formats)
    return query, cache.slabs, *cache[1:3], plan, formats, 0.1 / magnitude


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
        "two programs": lambda: case(FORMATS[0], 3, 4),
        "keys of 8 bits": lambda: case(FORMATS[1], 1, 2),
        "large queries": lambda: case(FORMATS[2], 2, 1, 2.0**17),
    },
    rtol=2**-8,
    atol=4e-3,
)
MUTANTS = {
    OP: [
        Mutant(
            "bytes of one part after the other",
            "place // OWN * (OWN * PARTS) + part * OWN + place % OWN",
            "place + part * COUNT",
            DIFFERS,
            file="tiles",
        ),
        Mutant(
            "keys of the first part",
            "own_of_part(part, 256",
            "own_of_part(0, 256",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "scales of the first part",
            "own_of_part(part, 32 * TILES",
            "own_of_part(0, 32 * TILES",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "values of the first part",
            "places = part * VALUE_BYTES",
            "places = 0 * VALUE_BYTES",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "values of the next slab",
            "places = part * VALUE_BYTES",
            "places = 2 * part * VALUE_BYTES",
            DIFFERS,
            file="tiers",
        ),
        Mutant("zeros of the last part alone", "scores + biased", "biased", DIFFERS, file="tiers"),
        Mutant(
            "halves in the order of channels",
            "exact[nth % 2 * PARTS + nth // 2]",
            "exact[nth]",
            DIFFERS,
            file="tiles",
        ),
        Mutant(
            "units of one half",
            "for nth in tl.static_range(1, 2 * PARTS):",
            "for nth in tl.static_range(1, 1):",
            RuntimeWarning,
            "All-NaN",
            file="tiles",
            within="unit_query",
        ),
        Mutant(
            "rows side by side",
            "tl.broadcast_to(tile[None, :, :], (2, 8, COLUMNS))",
            "tl.broadcast_to(tile[:, None, :], (8, 2, COLUMNS))",
            DIFFERS,
            file="tiles",
        ),
        Mutant(
            "results in the order of parts",
            "nth % 2 * (SIZE // 2) + nth // 2 * WIDTH",
            "nth * WIDTH",
            DIFFERS,
        ),
        Mutant(
            "stale values",
            "tl.where(is_loaded, tl.load(low), 0.0)",
            "tl.load(low)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "tokens' keys of the first part",
            "places = in_slab + (part * WIDTH",
            "places = in_slab + (0 * WIDTH",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "tokens' values of the first part",
            "low = values_ptr + (in_slab + (part * WIDTH",
            "low = values_ptr + (in_slab + (0 * WIDTH",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "a query's first part for both",
            "tl.dot(query[part], tl.trans",
            "tl.dot(query[0], tl.trans",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "queries of the first program",
            "row, column = first_row + tl.arange(0, 16)",
            "row, column = tl.arange(0, 16)",
            DIFFERS,
            file="tiles",
        ),
        Mutant(
            "hidden as of the first program",
            "(first_row + tl.arange(0, ROWS)) % QUERY_LEN",
            "tl.arange(0, ROWS) % QUERY_LEN",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "results of the first program",
            "row, channel = first_row + tl.arange(0, ROWS)",
            "row, channel = tl.arange(0, ROWS)",
            DoubleStore,
            "store of partial",
        ),
        Mutant(
            "programs that share a row",
            "tl.program_id(0) % PROGRAMS * ROWS",
            "tl.program_id(0) % PROGRAMS * (ROWS - 1)",
            DoubleStore,
            "store of partial",
        ),
        Mutant(
            "programs for heads",
            "head = tl.program_id(0) // PROGRAMS",
            "head = tl.program_id(0)",
            OutOfBounds,
            "load of key_slabs",
        ),
        Mutant(
            "one program of two",
            'num_kv_heads * meta["PROGRAMS"]',
            "num_kv_heads",
            DIFFERS,
            file="api",
        ),
    ],
}
