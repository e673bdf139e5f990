"""Entry point of the op."""

import torch

from kernels.launch import Launcher, runs_kernels
from kernels.skip_list import reference
from kernels.tiered_plan.reference import Formats

_launch = Launcher(reference.CONTRACT, "kernels.skip_list.kernel:skip_list_kernel")


def skip_list(
    masses: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    formats: Formats,
    budget: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """masses [num_rows, num_kv_heads, blocks, group] and lse [num_rows, num_heads] fp32 of
    `tiered_skip`, bounds [num_sequences, 4] int32 of its plan -> skips [num_rows, num_kv_heads,
    blocks] int32 for the next step, in `out` if that is given: the lightest blocks, of no query
    more than `budget` of what it attended to together. One launch takes the rows of all layers, one
    layer after another."""
    if not runs_kernels(masses):
        chosen = reference.skip_list(masses, lse, bounds, formats, budget)
        return chosen if out is None else out.copy_(chosen)
    num_rows, num_kv_heads, blocks, group = masses.shape
    skips = masses.new_empty(masses.shape[:3], dtype=torch.int32) if out is None else out
    meta = reference.meta_of(formats, group)
    counts = len(bounds), num_kv_heads, blocks, group
    _launch((num_rows * num_kv_heads,), masses, lse, bounds, skips, *counts, budget, **meta)
    return skips
