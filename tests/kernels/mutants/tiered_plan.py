"""Mutants of tiered_plan."""

import torch

from kernels.errors import DoubleStore, OutOfBounds, StoredInput, Uninitialised
from kernels.tiered_plan.reference import FORMATS, tiered_plan
from tests.kernels.mutants.mutant import DIFFERS, Mutant, Op
from tests.kernels.slab_caches import bounds_of

LENGTHS = [1000, 0, 64, 65, 131, 0, 200]
OP = Op(
    "tiered_plan",
    "tiered_plan",
    tiered_plan,
    {
        "more sequences than are looked at together": lambda: (
            bounds_of(LENGTHS * 10),
            29,
            FORMATS[0],
        ),
        "more runs than work": lambda: (bounds_of([900, 0]), 40, FORMATS[1]),
        "codes alone": lambda: (torch.tensor([[0, 640, 1280, 1280]]).int(), 7, FORMATS[0]),
        "runs that are nearly enough": lambda: (bounds_of([65] * 5), 9, FORMATS[0]),
        "runs that are just enough": lambda: (bounds_of([80, 48]), 3, FORMATS[0]),
        "nothing": lambda: (torch.zeros(2, 4, dtype=torch.int32), 3, FORMATS[1]),
        "two tiers of 8 bits": lambda: (bounds_of(LENGTHS), 5, FORMATS[2]),
    },
)
MUTANTS = {
    OP: [
        Mutant(
            "a run of nothing",
            "return tl.where(fits, found, most), tl.where(fits, found, 1)",
            "return tl.where(fits, found, most), tl.where(fits, found, 0)",
            DIFFERS,
        ),
        Mutant(
            "a run that is never enough",
            "is_enough = tl.sum(pieces, 0) <= runs",
            "is_enough = tl.sum(pieces, 0) < runs",
            DIFFERS,
        ),
        Mutant("more than a run may take", "fits = found <= most", "fits = found > 0", DIFFERS),
        Mutant(
            "a change that costs nothing",
            "tl.where((tokens > 0) & (cold + warm > 0)",
            "tl.where(tokens < 0",
            DIFFERS,
        ),
        Mutant("a change without codes", "(tokens > 0) & (cold + warm > 0)", "tokens > 0", DIFFERS),
        Mutant(
            "a change from nothing", "(tokens > 0) & (cold + warm > 0)", "cold + warm > 0", DIFFERS
        ),
        Mutant("no place spared", "runs - runs // SPARED)", "runs)", DIFFERS),
        Mutant(
            "a sequence not rounded up",
            "last_run = tl.cdiv(base + cost, per_run)",
            "last_run = (base + cost) // per_run",
            DIFFERS,
        ),
        Mutant(
            "a price that is another's",
            "cold_cost: tl.constexpr = KEY_BITS // 4 + VALUE_BITS // 4",
            "cold_cost: tl.constexpr = KEY_BITS // 4",
            DIFFERS,
        ),
        Mutant("a run's first sequence twice", "is_own & (base % per_run > 0)", "is_own", DIFFERS),
        Mutant(
            "runs that stand for nothing",
            "tl.where(is_run & has_sequence, place, run)",
            "tl.where(is_run, place, run)",
            DIFFERS,
        ),
        Mutant(
            "a run rounded down",
            "tl.cdiv(tl.sum(whole), runs - runs // SPARED)",
            "tl.sum(whole) // (runs - runs // SPARED)",
            DIFFERS,
        ),
        Mutant(
            "a sequence that ends where a run begins",
            "ends[None, :] <= begin[:, None]",
            "ends[None, :] < begin[:, None]",
            DIFFERS,
        ),
        Mutant(
            "sums of a part alone",
            "ends = before_all + tl.cumsum(costs, 0)",
            "ends = tl.cumsum(costs, 0)",
            DIFFERS,
        ),
        Mutant(
            "sequences past the last",
            "is_before = is_before & is_sequence[None, :]",
            "is_before = is_before",
            DIFFERS,
        ),
        Mutant(
            "bounds past the last",
            "steps_of(bounds_ptr, sequence, has_sequence, VALUE_BITS)",
            "steps_of(bounds_ptr, sequence, mask, VALUE_BITS)",
            OutOfBounds,
            "load of bounds",
        ),
        Mutant(
            "hot tokens rounded down",
            "tl.cdiv(length - warm, 16)",
            "(length - warm) // 16",
            DIFFERS,
        ),
        Mutant(
            "warm blocks that are cold",
            "    if VALUE_BITS == 8:\n        cold = warm\n",
            "",
            DIFFERS,
        ),
        Mutant(
            "a step too early",
            "first = tl.minimum(tl.cdiv(tl.maximum(begin - at, 0), cost), num)",
            "first = tl.minimum(tl.maximum(begin - at, 0) // cost, num)",
            DIFFERS,
        ),
        Mutant(
            "steps past the last",
            "last = tl.minimum(tl.cdiv(tl.maximum(end - at, 0), cost), num)",
            "last = tl.cdiv(tl.maximum(end - at, 0), cost)",
            DIFFERS,
        ),
        Mutant(
            "records past the last",
            "mask = place < records",
            "mask = place <= records",
            OutOfBounds,
            "store of plan",
        ),
        Mutant("turns as they come", "tl.where(is_run, place, runs + before)", "place", DIFFERS),
        Mutant(
            "two turns for one",
            "(others[None, :] == own[:, None]) & is_first",
            "False",
            DoubleStore,
            "store of plan",
        ),
        Mutant(
            "a turn that is not stored",
            "\n    tl.store(turn_ptr, place, mask=mask)",
            "",
            Uninitialised,
            "elements of plan were never stored",
        ),
        Mutant(
            "bounds that are written",
            "tl.store(record + SINK_SLABS, sink // 16, mask=mask)",
            "tl.store(bounds_ptr + place, sink // 16, mask=mask)",
            StoredInput,
            "store into bounds",
        ),
        Mutant(
            "too few records",
            'cdiv(num_records, meta["RECORDS"])',
            'num_records // meta["RECORDS"]',
            Uninitialised,
            file="api",
        ),
    ],
}
