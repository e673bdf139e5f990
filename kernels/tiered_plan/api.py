"""Entry point of the op."""

import torch

from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.tiered_plan import reference
from kernels.tiered_plan.reference import Formats

_launch = Launcher(reference.CONTRACT, "kernels.tiered_plan.kernel:tiered_plan_kernel")


def tiered_plan(bounds: torch.Tensor, num_runs: int, formats: Formats) -> torch.Tensor:
    """bounds [num_sequences, 4] int32: the tokens where a sequence's sink, cold and warm tier end,
    multiples of 64, and its length -> [num_runs + num_sequences, 16] int32: which slabs each run
    reads. Made once a step, for all layers of the same formats."""
    assert bounds.shape[1] == 4, bounds.shape
    if not runs_kernels(bounds):
        return reference.tiered_plan(bounds, num_runs, formats)
    num_records = num_runs + len(bounds)
    plan = bounds.new_empty(num_records, reference.RECORD_SIZE)
    meta = reference.meta_of(formats)
    grid = (cdiv(num_records, meta["RECORDS"]),)
    _launch(grid, bounds, plan, len(bounds), num_records, **meta)
    return plan
