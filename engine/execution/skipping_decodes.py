"""Steps that only decode, over tiers, and leave out the values of cold blocks: the last step's
masses choose which, this step's scan certifies it (docs/certified-skipping.md)."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from engine.cache.formats import Part
from engine.execution.skip_counts import SkipCounter
from engine.execution.tiered_decodes import PlannedRows
from engine.execution.tiered_inputs import DemotedBlocks
from engine.execution.tiered_kv import BITS, TieredKV, formats_of
from engine.execution.tiered_skips import GroupSkips, SkipRows, SkipsShape, StepSkips
from engine.sequence import Sequence
from kernels.skip_list.api import skip_list
from kernels.tiered_plan.reference import WARM_BITS
from kernels.tiered_skip import reference
from kernels.tiered_skip.api import tiered_skip
from kernels.tiered_skip.rounding import reach_of_blocks, reach_of_tokens

# Of epsilon: what the next step is to skip by this one's masses, for they move. Least was read on
# prose of 0.3 to 2.5.
BUDGET = 0.6
RAISED_TOGETHER = 1024  # blocks, each of a layer, of which a bound is found at a time


class SkippingDecodes:
    """Attention of a step's rows, in the place of `kernels.tiered_decode`."""

    def __init__(
        self,
        kv: TieredKV,
        num_heads: int,
        scale: float,
        key_lengths: torch.Tensor,
        most: int,
        max_model_len: int,
    ) -> None:
        """key_lengths [num_layers, num_kv_heads]: no key is longer. most: sequences of a step."""
        self._kv = kv
        self._scale = scale
        self._epsilon = kv.groups[0].config.skip_epsilon
        self._formats = [formats_of(group.config) for group in kv.groups]
        self._nth = {layer: nth for group in kv.groups for nth, layer in enumerate(group.layers)}
        heads = num_heads, kv.num_kv_heads
        reach = reach_of_tokens(key_lengths.to(kv.device), kv.head_dim)
        self._groups = [
            GroupSkips(
                SkipsShape.of(group.config, group.num_layers, heads, max_model_len),
                most,
                reach[list(group.layers)],
            )
            for group in kv.groups
        ]
        self._rows = SkipRows(self._groups)
        self._recorded: set[int] = set()
        self._newest: dict[int, StepSkips] = {}  # by layer group
        self._stored: list[tuple[int, DemotedBlocks]] = []  # of which no bound is found yet
        self.counter = SkipCounter(num_heads // kv.num_kv_heads, kv.device)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self._groups)

    def begin_recorded(self, sequences: Items[Sequence]) -> None:
        """Before the replay of a step of these, in the least size that was recorded."""
        self.begin(sequences, min(size for size in self._recorded if size >= len(sequences)))

    def begin(self, sequences: Items[Sequence], size: int) -> None:
        """The host's part of a step: of `size` rows the first are these sequences'."""
        self.find_reach()
        self._rows.arrange(sequences, size)
        self.counter.read()

    def record(self, size: int) -> None:
        """Steps of so many rows are recorded."""
        self._recorded.add(size)

    def stored(self, group: int, demoted: DemotedBlocks) -> None:
        """These blocks, slabs of `TieredKV.whole`, are what the step, or the one that is under way,
        leaves."""
        if demoted.part is Part.KEYS:
            self._stored.append((group, demoted))

    def find_reach(self) -> None:
        """Of what has been `stored`, before another step stores over it."""
        stored, self._stored = self._stored, []
        for number, demoted in stored:
            self._raise_reach(number, demoted)

    def prepare(self, group: int, bounds: torch.Tensor) -> StepSkips:
        """The device's part, for all layers of the group."""
        self._newest[group] = self._groups[group].begin(bounds)
        return self._newest[group]

    def attend(
        self, layer: int, query: torch.Tensor, decodes: PlannedRows, step: StepSkips
    ) -> torch.Tensor:
        """Of the step's rows; behind the group's last layer the next step's lists are chosen."""
        number, nth = self._kv.group_of[layer], self._nth[layer]
        tables, formats = decodes.tables, self._formats[number]
        slabs, columns = self._kv.layers[layer], (tables.key_tables, tables.value_tables)
        dealt = tables.bounds if decodes.plan is None else decodes.plan
        lists = step.skips[nth], step.masses[nth], step.left_out[nth], step.reach[nth]
        given = (query, slabs, *columns, dealt, formats, self._scale, *lists, self._epsilon)
        sums = step.lse[nth], step.skipped[nth]
        if decodes.plan is not None:
            attended, *_ = tiered_skip(*given, sums=sums)
        else:
            attended, *found = reference.tiered_skip(*given)
            for kept, each in zip(sums, found, strict=True):
                kept.copy_(each)
            attended = attended.to(query.dtype)
        if nth == len(step.skips) - 1:
            self._choose(number, step)
        return attended

    def certificates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the newest step's first row: no more of its softmax was left out, [num_layers,
        num_heads], and how many blocks' values were not read, [num_layers, num_kv_heads]."""
        pairs = sorted(
            (layer, number)
            for number, group in enumerate(self._kv.groups)
            for layer in group.layers
        )
        steps = [(self._newest[number], self._nth[layer]) for layer, number in pairs]
        return (
            torch.stack([step.certificates[nth, 0] for step, nth in steps]),
            torch.stack([step.left_out[nth, 0].sum(-1) for step, nth in steps]),
        )

    def _choose(self, number: int, step: StepSkips) -> None:
        formats = self._formats[number]
        last = step.bounds[:, 2 if formats.value_bits == WARM_BITS else 1]
        self.counter.add(step, (last - step.bounds[:, 0]) // 64)
        masses, lse, skips = (each.flatten(0, 1) for each in (step.masses, step.lse, step.skips))
        skip_list(masses, lse, step.bounds, formats, BUDGET * self._epsilon, skips)

    def _raise_reach(self, number: int, demoted: DemotedBlocks) -> None:
        group, metas = self._kv.groups[number], self._kv.whole[number].key_meta
        grain = group.config.cold.keys.num_slabs
        slots = (demoted.targets[:, 0].long() // grain).view(group.num_layers, -1)
        reach, bits = self._groups[number].reach, BITS[demoted.target_format]
        together = max(1, RAISED_TOGETHER // group.num_layers)
        for some in slots.split(together, 1):
            torch.maximum(reach, reach_of_blocks(metas[some], bits).amax(1), out=reach)
