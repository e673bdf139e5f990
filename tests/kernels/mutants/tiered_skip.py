"""Mutants of tiered_skip."""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.errors import DeviceAssertion, DoubleStore, OutOfBounds
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.reference import FORMATS, Formats, tiered_plan
from kernels.tiered_skip import reference
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op
from tests.kernels.skipped_caches import skipping

# Most of it cold, in sequences of several KV heads.
HEAVY = torch.tensor([[64, 1088, 1088, 1100]]).int()
TIERS = torch.tensor([[0, 256, 256, 270], [0, 0, 0, 0], [64, 256, 320, 325]]).int()


def case(
    formats: Formats,
    num_runs: int,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    bounds: torch.Tensor = TIERS,
) -> Any:
    made = skipping(bounds, num_kv_heads, num_heads, 64, formats)
    made.query[:] *= 2
    masses = torch.full_like(made.masses, -7.0)
    made.reach[:] = torch.arange(made.reach.numel()).view(made.reach.shape) / 64
    plan = tiered_plan(bounds, num_runs, formats)
    rest = (made.skips, masses, made.left_out, made.reach, epsilon, torch.float32)
    return made.query, *made.cache[:3], plan, formats, made.scale, *rest


def expected(
    query: torch.Tensor,
    slabs: Slabs,
    key_tables: torch.Tensor,
    value_tables: torch.Tensor,
    plan: torch.Tensor,
    *others: Any,
) -> Sequence[torch.Tensor]:
    """Of the bounds that were planned."""
    *others, _ = others
    bounds = next(each for each in (TIERS, HEAVY) if len(each) == len(query))
    tables = key_tables, value_tables, bounds
    found = reference.tiered_skip(query, slabs, *tables, *others)
    return [each.float() for each in found]


def case_of_all() -> Any:
    """The last cold block is skipped, of the last run, and that is too much."""
    arguments = case(FORMATS[2], 10, 2, 1, 0.0)
    for skips in (arguments[7], arguments[9]):
        skips[:] = 0
        skips[0, 0, 3] = skips[2, 0, 3] = 1
    return arguments


OP = Op(
    "tiered_skip",
    "tiered_skip",
    expected,
    {
        "no head skips too much": lambda: case(FORMATS[1], 3, 4, 2, 0.9999),
        "one KV head of each sequence does": lambda: case(FORMATS[0], 5, 4, 2, 0.5),
        "all do": case_of_all,
        "the heaviest are too much": lambda: case(FORMATS[1], 3, 2, 1, 0.5, HEAVY),
    },
    rtol=2**-8,
    atol=6e-3,
)
FIRST, AGAIN, MERGE = (f"tiered_skip{each}_kernel" for each in ("", "_again", "_merge"))
MUTANTS = {
    OP: [
        Mutant(
            "skips that are turned round",
            "is_read = tl.load(skips_ptr + block) == 0",
            "is_read = tl.load(skips_ptr + block) != 0",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "skips of another block",
            "tl.load(skips_ptr + block) == 0",
            "tl.load(skips_ptr + block + 1) == 0",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "values that are weighed unread",
            "        if is_read:\n",
            "        if True:\n",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "codes that are not rescaled",
            "(attended[0] * shrink[None, :], attended[1] * shrink[None, :])",
            "(attended[0], attended[1] * shrink[None, :])",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "zeros that are not rescaled",
            "attended_zeros *= shrink[None, :]",
            "attended_zeros *= 1.0",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "what is skipped counts as attended to",
            "tl.where(is_read, sums, 0.0)",
            "sums",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "what is skipped is not rescaled",
            "skipped = skipped * shrink[:, None]",
            "skipped = skipped",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "a certificate of the last block alone",
            "any_skipped |= tl.where(is_read, 0, 1)",
            "any_skipped = tl.where(is_read, 0, 1)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "masses that are not raised",
            "+ LOST) + raised",
            "+ LOST)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "masses of another block",
            "masses_ptr + block * group + row,",
            "masses_ptr + block + row,",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "a mass too many",
            "mass, mask=row < group",
            "mass, mask=row <= group",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "raised once where it is twice",
            "return 2 * (length",
            "return (length",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "half a query's length",
            "tl.sum(low * low, 1) + tl.sum(high * high, 1)",
            "tl.sum(low * low, 1)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "the reach of another head",
            "reach_ptr + row * kv_heads + head",
            "reach_ptr + row * kv_heads",
            DIFFERS,
        ),
        Mutant(
            "places of another head",
            "own = (row * kv_heads + head) * blocks",
            "own = row * kv_heads * blocks",
            DoubleStore,
            "store of masses",
            within=FIRST,
        ),
        Mutant(
            "a certificate that is not raised",
            "LOST) + raised",
            "LOST) - WEIGHT",
            DIFFERS,
        ),
        Mutant(
            "certificates of another record",
            "both_sums(partial_sums_ptr + at, records * heads)",
            "both_sums(partial_sums_ptr, records * heads)",
            DoubleStore,
            "store of partial_sums",
            within=FIRST,
        ),
        Mutant(
            "a head that is never too much",
            "(skipped - lse <= most) == 0",
            "(skipped - lse <= most + 100) == 0",
            DIFFERS,
        ),
        Mutant(
            "a head that is too much alone",
            "if tl.max(is_too_much.to(tl.int32), 0) == 0:",
            "if tl.min(is_too_much.to(tl.int32), 0) == 0:",
            DIFFERS,
        ),
        Mutant(
            "a certificate of the first run",
            "partial_lse_ptr + first, num_runs, heads",
            "partial_lse_ptr + first, 1, heads",
            DIFFERS,
        ),
        Mutant(
            "sums of the first run alone",
            "num_runs = tl.load(sequence_ptr + fields.NUM_RUNS, mask=has_run, other=0)",
            "num_runs = 1",
            DIFFERS,
        ),
        Mutant(
            "results of another sequence",
            "FIRST_RUN) + sequence) * heads",
            "FIRST_RUN)) * heads",
            DIFFERS,
        ),
        Mutant(
            "what was attended to, again",
            "= tl.load(skips_ptr + block, mask=block < last, other=0) != 0",
            "= tl.load(skips_ptr + block, mask=block < last, other=0) > -1",
            OutOfBounds,
            file="tiers",
        ),
        Mutant(
            "skips of another head",
            "    skips_ptr += places\n",
            "    skips_ptr += row * kv_heads * blocks\n",
            DIFFERS,
        ),
        Mutant(
            "all that was skipped",
            "is_left_out = is_skipped & (greatest <= limit)",
            "is_left_out = is_skipped & (greatest <= limit - 20)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "the lightest that was skipped",
            "is_heavy = is_skipped & (is_left_out == 0)",
            "is_heavy = is_left_out",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "the last query's share",
            "greatest = tl.maximum(greatest, shares)",
            "greatest = tl.maximum(shares, shares)",
            DIFFERS,
            file="tiers",
        ),
        Mutant("the safe limit", "limit = low\n", "limit = safe\n", DIFFERS, file="tiers"),
        Mutant("no limit", "limit = low\n", "limit = limit\n", DIFFERS, file="tiers"),
        Mutant(
            "a certificate of what was read after all",
            "tl.where(is_left_out, tl.exp2(shares) + LOST, 0.0)",
            "tl.where(is_skipped, tl.exp2(shares) + LOST, 0.0)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "a list of the second on",
            "tl.where(is_heavy, counts - 1, -1)",
            "tl.where(is_heavy, counts, -1)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "a list but for its last",
            "these = (0, tl.max(counts, 0))",
            "these = (0, tl.max(counts, 0) - 1)",
            DIFFERS,
            file="tiers",
        ),
        Mutant(
            "cold blocks of all slabs",
            "num_cold = num_cold // (KEY_BITS // 4)",
            "num_cold = num_cold * (KEY_BITS // 4)",
            OutOfBounds,
        ),
        Mutant(
            "certificates of no run",
            "        tl.store(again_skipped_ptr, unchanged, mask=rows < group)\n",
            "",
            DIFFERS,
        ),
        Mutant(
            "a place that is not stored",
            "        tl.store(again_lse_ptr + rows, nothing, mask=rows < group)\n",
            "",
            DIFFERS,
        ),
        Mutant(
            "a second merge that is left out",
            'if tl.max(again, 0) > float("-inf"):',
            'if tl.max(again, 0) > float("inf"):',
            DIFFERS,
            within=MERGE,
        ),
        Mutant(
            "a certificate to base 2",
            "skipped * LN_2, mask",
            "skipped, mask",
            DIFFERS,
            within=MERGE,
        ),
        Mutant(
            "a merge that is not rescaled",
            "merged = merged * shrink",
            "merged = merged",
            DIFFERS,
        ),
        Mutant(
            "runs without a program",
            "grid = num_kv_heads, len(plan)",
            "grid = num_kv_heads, 1",
            DIFFERS,
            file="api",
        ),
        Mutant(
            "swapped tables",
            "*slabs, key_tables, value_tables, plan",
            "*slabs, value_tables, key_tables, plan",
            DeviceAssertion,
            "a slab beyond the arena",
            file="api",
        ),
    ],
}
