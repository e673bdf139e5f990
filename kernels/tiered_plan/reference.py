"""The specification: all sequences' slabs, of keys and of values, in equal numbers to all runs.

Slabs have the same bytes in every format, and reading them is what a step costs. A run that goes on
in a second sequence needs a second program for that, and no more programs run at once than there
are runs. So runs take a little more than their share, as much as it takes that none goes on; where
it takes too much, some places are left to the second programs.
"""

from typing import NamedTuple

import torch

from kernels.contract import Contract, Count, Output, Tensor
from kernels.kv_quantise.layout import BLOCK_TOKENS, SLAB_TOKENS, slabs_of_block
from kernels.launch import cdiv

TOKEN_BITS, WARM_BITS = 16, 8
NO_RUN = -1
# Slabs that could be read in the time in which a run changes from bfloat16 to codes.
CHANGE_COST = 3
SPARED = 8  # of so many runs one leaves its place: best of what was measured on an H200
CANDIDATES = 16  # for what a run takes
RECORD_SIZE = 16
# Of a record: a sequence, a run, what that takes of each format, where the formats lie in the
# tables; of a sequence's own record, which runs take parts of it; last, which record it is whose
# turn it is there.
(
    SEQUENCE,
    RUN,
    FIRST_TOKEN_SLAB,
    LAST_TOKEN_SLAB,
    FIRST_COLD,
    LAST_COLD,
    FIRST_WARM,
    LAST_WARM,
    SINK_SLABS,
    KEY_SKIP,
    VALUE_SKIP,
    NUM_TOKENS,
    WARM_BLOCKS,
    FIRST_RUN,
    NUM_RUNS,
    TURN,
) = range(RECORD_SIZE)
CONTRACT = Contract(
    "tiered_plan",
    bounds=Tensor("sequences 4", torch.int32),
    plan=Output("records 16", torch.int32),
    sequences=Count("sequences"),
    records=Count("records"),
)


class Formats(NamedTuple):
    """Bits of the cold tier's keys and values: (4, 4), (8, 4) or (8, 8)."""

    key_bits: int
    value_bits: int


FORMATS = (Formats(4, 4), Formats(8, 4), Formats(8, 8))
SERVED_FORMATS = Formats(8, 4)  # what a cold tier has unless it is told otherwise


def meta_of(formats: Formats) -> dict[str, int]:
    """What the kernel is launched with."""
    bits = {"KEY_BITS": formats.key_bits, "VALUE_BITS": formats.value_bits}
    return bits | {"RECORDS": 32, "SEQUENCES": 64, "num_warps": 4}


def tiered_plan(bounds: torch.Tensor, num_runs: int, formats: Formats) -> torch.Tensor:
    """bounds [num_sequences, 4] int32: the tokens where sink, cold and warm tier end, multiples of
    64, and the length. -> [num_runs + num_sequences, 16] int32 records.

    Of a sequence first the slabs of bfloat16 (sink and hot) are dealt, then cold, then warm ones.
    Record r is what run r takes of its first sequence; record num_runs + s what the run in which
    sequence s begins takes of that, unless it is that run's first. RUN is NO_RUN where a record
    stands for nothing. What run r finds of sequence s is stored as r + s.

    More programs than run at once: those of sequences' own records wait until a run has ended that
    takes less of its first one, and the longest is served first. Their turns are told by TURN.
    """
    costs = [_steps(each, formats)[-1].end for each in bounds.tolist()]
    num_spared = num_runs // SPARED
    least, per_run = (max(1, cdiv(sum(costs), num_runs - spared)) for spared in (0, num_spared))
    step = max(1, cdiv(per_run - least, CANDIDATES))
    for enough in range(least, min(per_run, least + (CANDIDATES - 1) * step) + 1, step):
        if sum(cdiv(cost, enough) for cost in costs) <= num_runs:
            per_run = enough
            costs = [cdiv(cost, enough) * enough for cost in costs]
            break
    starts = [sum(costs[:row]) for row in range(len(costs) + 1)]
    records = torch.zeros(num_runs + len(costs), RECORD_SIZE, dtype=torch.int32)
    records[:, RUN] = NO_RUN
    waiting = [
        min(cost, per_run - start % per_run) if start % per_run else 0
        for start, cost in zip(starts[:-1], costs, strict=True)
    ]
    turns = sorted(range(len(costs)), key=lambda row: -waiting[row])
    for run in range(num_runs):
        begin = run * per_run
        row = sum(each <= begin for each in starts[1:])
        records[run, SEQUENCE] = row
        if row < len(costs):
            offset = begin - starts[row]
            records[run] = _taken(bounds[row].tolist(), offset, offset + per_run, formats)
            records[run, SEQUENCE], records[run, RUN] = row, run
    for row, (start, cost) in enumerate(zip(starts[:-1], costs, strict=True)):
        record = _taken(bounds[row].tolist(), 0, per_run - start % per_run, formats)
        record[SEQUENCE], record[FIRST_RUN] = row, start // per_run
        record[NUM_RUNS] = cdiv(start + cost, per_run) - start // per_run if cost else 0
        record[RUN] = start // per_run if cost and start % per_run else NO_RUN
        records[num_runs + row] = record
    records[:, TURN] = torch.tensor([*range(num_runs), *(num_runs + row for row in turns)])
    return records


class _Steps(NamedTuple):
    """num: how many; cost: of one, in slabs; start: the cost at which the first begins."""

    num: int
    cost: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.num * self.cost


def _steps(bounds: list[int], formats: Formats) -> tuple[_Steps, _Steps, _Steps]:
    """Of one sequence, in bfloat16, cold and warm."""
    sink, cold, warm, length = bounds
    if formats.value_bits == WARM_BITS:
        cold = warm
    tokens = _Steps(sink // SLAB_TOKENS[16] + cdiv(length - warm, SLAB_TOKENS[16]), 2, 0)
    changes = tokens.num > 0 and warm > sink
    start = tokens.end + CHANGE_COST * changes
    num_cold, num_warm = (cold - sink) // BLOCK_TOKENS, (warm - cold) // BLOCK_TOKENS
    codes = _Steps(num_cold, sum(slabs_of_block(bits) for bits in formats), start)
    return tokens, codes, _Steps(num_warm, 2 * slabs_of_block(WARM_BITS), codes.end)


def _taken(bounds: list[int], begin: int, end: int, formats: Formats) -> torch.Tensor:
    """Of a sequence, the steps that begin at a cost from `begin` to `end`."""
    record = torch.zeros(RECORD_SIZE, dtype=torch.int32)
    tiers = _steps(bounds, formats)
    for place, steps in zip((FIRST_TOKEN_SLAB, FIRST_COLD, FIRST_WARM), tiers, strict=True):
        for offset, edge in enumerate((begin, end)):
            num_begun = cdiv(max(edge - steps.start, 0), steps.cost)
            record[place + offset] = min(num_begun, steps.num)
    sink, _, warm_end, length = bounds
    _, cold, warm = tiers
    record[SINK_SLABS] = sink // SLAB_TOKENS[16]
    skipped = [cold.num * slabs_of_block(bits) + 2 * warm.num for bits in formats]
    record[KEY_SKIP], record[VALUE_SKIP] = skipped
    record[NUM_TOKENS] = sink + length - warm_end
    record[WARM_BLOCKS] = warm.num
    return record
