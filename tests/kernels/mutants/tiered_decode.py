"""Mutants of tiered_decode."""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.errors import ContractError, DeviceAssertion, DoubleStore, OutOfBounds, StoredInput
from kernels.tiered_decode import reference
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.reference import FORMATS, Formats, tiered_plan
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op
from tests.kernels.slab_caches import bounds_of, slab_cache, tokens_of

TIERS = bounds_of([460, 0, 70], warm=128)
LONG = bounds_of([1700, *[0] * 7], hot=1500, warm=0)


def case(
    bounds: torch.Tensor, formats: Formats, num_runs: int, num_heads: int, num_kv_heads: int
) -> tuple[Any, ...]:
    cache = slab_cache(bounds, num_kv_heads, 64, formats)
    query = tokens_of(len(bounds), num_heads + 1, 64, seed=5).transpose(0, 1)[:, 1:]
    query[..., 0] *= 5
    plan = tiered_plan(bounds, num_runs, formats)
    return query, cache.slabs, *cache[1:3], plan, formats, 0.125


def expected(
    query: torch.Tensor,
    slabs: Slabs,
    key_tables: torch.Tensor,
    value_tables: torch.Tensor,
    plan: torch.Tensor,
    formats: Formats,
    scale: float,
) -> Sequence[torch.Tensor]:
    """Of the bounds that were planned."""
    num_runs = len(plan) - len(query)
    plans = ((each, tiered_plan(each, num_runs, formats)) for each in (TIERS, LONG))
    bounds = next(bounds for bounds, planned in plans if torch.equal(planned, plan))
    tables = key_tables, value_tables, bounds
    out, lse = reference.tiered_decode(query, slabs, *tables, formats, scale)
    return out.to(query.dtype), lse.float()


OP = Op(
    "tiered_decode",
    "tiered_decode",
    expected,
    {
        "4 bits": lambda: case(TIERS, FORMATS[0], 5, 6, 2),
        "keys of 8 bits": lambda: case(TIERS, FORMATS[1], 3, 2, 1),
        "8 bits": lambda: case(TIERS, FORMATS[2], 3, 9, 1),
        "a merge in several steps": lambda: case(LONG, FORMATS[0], 32, 1, 1),
    },
    rtol=2**-8,
    atol=4e-3,
)
HIDDEN = '        scores = tl.where(is_seen, scores, float("-inf"))\n'
MERGE = "tiered_decode_merge_kernel"
MUTANTS = {
    OP: [
        Mutant(
            "a token too many",
            "is_token = place < num_tokens",
            "is_token = place <= num_tokens",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "stale values",
            "tl.load(low, mask=is_loaded, other=0.0)",
            "tl.load(low)",
            DIFFERS,
            file="tiers",
        ),
        Mutant("scores that are not hidden", HIDDEN, "", DIFFERS, file="tiers"),
        Mutant(
            "a hot slab looked up in the sink",
            "slab >= sink_slabs",
            "slab > sink_slabs",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "tokens of another stride",
            "head * SIZE\n",
            "head * 16\n",
            DIFFERS,
            within="attend_tokens",
            file="tiers",
        ),
        Mutant(
            "values that are not rescaled",
            "attended[2 * part + 1] * shrink[None, :]",
            "attended[2 * part + 1]",
            DIFFERS,
            within="added_tokens",
            file="tiers",
        ),
        Mutant(
            "zeros that are not rescaled",
            "attended_zeros * shrink[None, :]",
            "attended_zeros",
            DIFFERS,
            within="attend_quantised",
            file="tiers",
        ),
        Mutant(
            "codes that are not rescaled",
            "attended[2 * part] * shrink[None, :]",
            "attended[2 * part]",
            DIFFERS,
            within="added_values",
            file="tiers",
        ),
        Mutant(
            "swapped halves of keys",
            "tl.dot(natural(scaled_low, 16, WIDTH), keys_low, scores)",
            "tl.dot(natural(scaled_low, 16, WIDTH), keys_high, scores)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "channels in another order",
            "tl.dot(natural(scaled_high, 16, WIDTH), keys_high, scores)",
            "tl.dot(scaled_high, keys_high, scores)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "metadata of another head",
            "FORMATS[2] * kv_heads + head",
            "FORMATS[2] * kv_heads",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "metadata past the last",
            "key_slot * (2 * SIZE)",
            "key_slot * (4 * SIZE)",
            OutOfBounds,
            "load of key_meta",
            file="tiers",
        ),
        Mutant(
            "slots of keys by slabs",
            "key_slabs[0] // FORMATS[2]",
            "key_slabs[0]",
            RuntimeWarning,
            "All-NaN",
            file="tiers",
        ),
        Mutant(
            "slots of values by slabs",
            "slot = slab // GRAIN",
            "slot = slab",
            OutOfBounds,
            "load of value_meta",
            file="tiers",
        ),
        Mutant(
            "a slot of one slab's tokens",
            "if BITS // GRAIN == 4:",
            "if BITS == 4:",
            OutOfBounds,
            "load of value_meta",
            file="tiers",
        ),
        Mutant(
            "slots where slabs are counted",
            "key_slots * KEY_GRAIN",
            "key_slots",
            DeviceAssertion,
            "a slab beyond the arena",
        ),
        Mutant(
            "grains of the other arena",
            "arenas.keys.shape[1], arenas.values.shape[1]",
            "arenas.values.shape[1], arenas.keys.shape[1]",
            DeviceAssertion,
            "a slab beyond the arena",
            file="api",
        ),
        Mutant(
            "slots of the other arena",
            "        len(arenas.keys),\n",
            "        len(arenas.values),\n",
            ContractError,
            file="api",
        ),
        Mutant("scales for zeros", "tl.load(own + SIZE)", "tl.load(own)", DIFFERS, file="tiers"),
        Mutant(
            "zeros of another token",
            "meta_ptr + 64 + places",
            "meta_ptr + 32 + places",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "the bias of another format",
            "-1032.0 if BITS == 4",
            "-1152.0 if BITS == 4",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "half of a block of values",
            "slabs_of(tables[1], block, num_values",
            "slabs_of(tables[1] - block, block, num_values",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "a part of another head",
            "value_starts = value_slabs[1] * slab_bytes + in_slab",
            "value_starts = value_slabs[1] * slab_bytes + head",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "slabs past the last",
            "slab_bytes, in_slab = kv_heads * (32 * SIZE)",
            "slab_bytes, in_slab = kv_heads * (64 * SIZE)",
            OutOfBounds,
            "load of",
            file="tiers",
        ),
        Mutant(
            "a cold tier that begins a block late",
            "tables = (key_table + cold_start,",
            "tables = (key_table + cold_start + 1,",
            DIFFERS,
        ),
        Mutant(
            "a warm tier in cold slabs",
            "warm_start = cold_start - 2 *",
            "warm_start = cold_start - 3 *",
            DIFFERS,
        ),
        Mutant(
            "a table past its end",
            "row * max_value_slabs",
            "row * max_value_slabs * 2 + 500",
            OutOfBounds,
            "load of value_tables",
        ),
        Mutant(
            "a table's last entry",
            "tables = (key_table + cold_start,",
            "tables = (key_table + cold_start + 20,",
            DeviceAssertion,
            "a slab beyond the arena",
        ),
        Mutant(
            "a query that is not scaled back",
            "factor = unit * (scale",
            "factor = 0 * unit + (scale",
            DIFFERS,
        ),
        Mutant(
            "queries of another head",
            "head * group * query_head_stride",
            "head * query_head_stride",
            DIFFERS,
        ),
        Mutant(
            "results of one row",
            "(run + row) * QUERY_LEN",
            "run * QUERY_LEN",
            DIFFERS,
        ),
        Mutant(
            "results of another head",
            "heads + head * group",
            "heads + head",
            DoubleStore,
            "store of partial",
        ),
        Mutant(
            "a head too many",
            "tl.broadcast_to((row < rows)[None, :], (WIDTH, ROWS))",
            "tl.broadcast_to((row <= rows)[None, :], (WIDTH, ROWS))",
            DoubleStore,
            "store of partial",
        ),
        Mutant(
            "zeros that are left out",
            "(attended[nth] + zeros) * inverse",
            "attended[nth] * inverse",
            DIFFERS,
        ),
        Mutant(
            "records of another run",
            "run = tl.load(record_ptr + fields.RUN)",
            "run = tl.load(record_ptr + fields.RUN) * 0",
            DoubleStore,
            "store of partial",
        ),
        Mutant(
            "a run past the last",
            "mask=split < num_runs, other",
            "mask=split <= num_runs, other",
            DIFFERS,
            within=MERGE,
        ),
        Mutant(
            "runs of another sequence", "FIRST_RUN) + sequence", "FIRST_RUN)", DIFFERS, within=MERGE
        ),
        Mutant("a merge that is not rescaled", "merged * shrink", "merged", DIFFERS, within=MERGE),
        Mutant(
            "nothing divided by nothing",
            "(columns >= 0) & (total != 0)",
            "columns >= 0",
            DIFFERS,
            within=MERGE,
        ),
        Mutant(
            "a query that is written",
            "    partial_lse_ptr += at\n",
            "    partial_lse_ptr = query_ptr\n",
            StoredInput,
            "store into query",
        ),
        Mutant(
            "a merge of too many columns",
            'cdiv(size, merge["COLUMNS"])',
            'cdiv(size, merge["COLUMNS"]) + 1',
            DoubleStore,
            "store of out",
            file="api",
        ),
        Mutant(
            "runs without a program",
            '(num_kv_heads * meta["PROGRAMS"], num_records)',
            "(num_kv_heads, 1)",
            DIFFERS,
            file="api",
        ),
        Mutant(
            "swapped tables",
            "*arenas, key_tables, value_tables, plan",
            "*arenas, value_tables, key_tables, plan",
            ContractError,
            file="api",
        ),
        Mutant(
            "swapped strides",
            "scalars = sequence_stride, head_stride",
            "scalars = head_stride, sequence_stride",
            ContractError,
            file="api",
        ),
    ],
}
