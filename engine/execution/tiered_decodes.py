"""Single tokens over tiers: rows whose reading is dealt out by a plan, and where recorded attention
finds them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial

import torch

from engine.cache.formats import Part
from engine.execution.decode_attention_graphs import TablesShape
from engine.execution.recorder import Recorder, Results
from engine.execution.tiered_inputs import TieredRows

NUM_BOUNDS = 4


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """`plan` deals out what these rows read; None where a reference computes them."""

    rows: slice
    tables: TieredRows
    plan: torch.Tensor | None


Planned = tuple[tuple[PlannedRows, ...], ...]  # by layer group
Planner = Callable[[Items[TieredRows]], Planned]


class TieredTables:
    """As `engine.execution.decode_attention_graphs.DecodeTables`."""

    def __init__(self, shape: TablesShape, planner: Planner, device: torch.device) -> None:
        """shape: the most sequences, and of each layer group how wide the tables of its keys and
        values are."""
        self.most, *widths = shape

        def zeros(width: int) -> torch.Tensor:
            return torch.zeros((self.most, width), dtype=torch.int32, device=device)

        pairs = zip(widths[:: len(Part)], widths[1 :: len(Part)], strict=True)
        self._groups = [TieredRows(*map(zeros, (*pair, NUM_BOUNDS))) for pair in pairs]
        self._planner = planner

    def record(self, size: int, recorder: Recorder) -> tuple[Planned, Callable[[], None]]:
        decodes = [
            TieredRows(each.key_tables[:size], each.value_tables[:size], each.bounds[:size])
            for each in self._groups
        ]
        planned = self._planner(decodes)  # not recorded, so that its memory is its own
        _, prepare = recorder.record(partial(self._plan, decodes, planned))
        return planned, prepare

    def place(self, decodes: Items[TieredRows]) -> int:
        num_decodes = len(decodes[0].bounds)
        for ours, theirs in zip(self._groups, decodes, strict=True):
            for table, given in (
                (ours.key_tables, theirs.key_tables),
                (ours.value_tables, theirs.value_tables),
                (ours.bounds, theirs.bounds),
            ):
                table[:num_decodes, : given.shape[1]].copy_(given)
            ours.bounds[num_decodes:].fill_(0)
        return num_decodes

    def _plan(self, decodes: Items[TieredRows], planned: Planned) -> Results:
        for ours, anew in zip(planned, self._planner(decodes), strict=True):
            for each, other in zip(ours, anew, strict=True):
                if each.plan is not None and other.plan is not None:
                    each.plan.copy_(other.plan)
        return ()
