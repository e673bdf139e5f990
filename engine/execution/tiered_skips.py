"""What sequences that decode skip of their cold blocks' values, from step to step: in tensors that
stay where they are, row by row of a step, so that recorded steps find them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from math import prod

import torch

from engine.cache.tier_config import TierConfig
from engine.execution.tiered_inputs import TABLE_STEP
from engine.execution.uploads import upload
from engine.sequence import Sequence

EMPTY = -1  # in the place of a row: a sequence that skips nothing yet
Rows = list[tuple[Sequence, int]]  # with how often it was preempted: its blocks are others then


@dataclass(frozen=True, slots=True)
class SkipsShape:
    """Of one layer group. blocks: that a sequence can skip; group: query heads of a KV head."""

    num_layers: int
    num_kv_heads: int
    group: int
    blocks: int

    @classmethod
    def of(
        cls, config: TierConfig, num_layers: int, heads: tuple[int, int], max_model_len: int
    ) -> SkipsShape:
        """heads: of queries, of KV."""
        num_heads, num_kv_heads = heads
        blocks = -(-max(1, config.num_cold(max_model_len - 1)) // TABLE_STEP) * TABLE_STEP
        return cls(num_layers, num_kv_heads, num_heads // num_kv_heads, blocks)

    def of_blocks(self, num_rows: int) -> tuple[int, ...]:
        return self.num_layers, num_rows, self.num_kv_heads, self.blocks

    def of_queries(self, num_rows: int) -> tuple[int, ...]:
        return self.num_layers, num_rows, self.num_kv_heads * self.group

    def num_bytes(self, num_rows: int) -> int:
        """Of `GroupSkips`: two lists and masses, and two sums a query."""
        of_blocks = prod(self.of_blocks(num_rows)) * (2 + self.group)
        return 4 * (of_blocks + 2 * prod(self.of_queries(num_rows)))


@dataclass(frozen=True, slots=True)
class StepSkips:
    """A step's rows, layer by layer, as `kernels.tiered_skip` takes and gives them. skips, left_out
    [num_layers, num_rows, num_kv_heads, blocks] int32, masses with a query head of the group more;
    lse, skipped [num_layers, num_rows, num_heads]; reach [num_layers, num_rows, num_kv_heads], and
    bounds [num_rows, 4] of the step."""

    skips: torch.Tensor
    left_out: torch.Tensor
    masses: torch.Tensor
    lse: torch.Tensor
    skipped: torch.Tensor
    reach: torch.Tensor
    bounds: torch.Tensor

    @property
    def certificates(self) -> torch.Tensor:
        """[num_layers, num_rows, num_heads]: no more of a query's softmax was left out."""
        return torch.sigmoid(self.skipped - self.lse).nan_to_num(0.0)  # of nobody's rows


class GroupSkips:
    """Of one layer group. `reach` [num_layers, num_kv_heads]: of all keys that were ever stored, as
    `kernels.tiered_skip.rounding` has it; so it is right for every sequence, whatever it shares."""

    def __init__(self, shape: SkipsShape, most: int, token_reach: torch.Tensor) -> None:
        """most: rows of a step. token_reach: of keys in bf16, a bound from the start."""
        self.reach = token_reach.contiguous()
        self._shape = shape
        device = token_reach.device
        num_cells, num_queries = prod(shape.of_blocks(most)), prod(shape.of_queries(most))
        self._skips = torch.zeros(num_cells, dtype=torch.int32, device=device)
        self._left_out = torch.zeros_like(self._skips)
        self._masses = torch.zeros(num_cells * shape.group, device=device)
        self._lse = torch.zeros(num_queries, device=device)
        self._skipped = torch.zeros(num_queries, device=device)

    @property
    def num_bytes(self) -> int:
        kept = self._skips, self._left_out, self._masses, self._lse, self._skipped
        return sum(each.nbytes for each in kept)

    def begin(self, bounds: torch.Tensor) -> StepSkips:
        num_rows = len(bounds)
        of_blocks, of_queries = self._shape.of_blocks(num_rows), self._shape.of_queries(num_rows)
        skips, left_out = _first(self._skips, of_blocks), _first(self._left_out, of_blocks)
        left_out.copy_(skips)
        return StepSkips(
            skips,
            left_out,
            _first(self._masses, (*of_blocks, self._shape.group)),
            _first(self._lse, of_queries),
            _first(self._skipped, of_queries),
            self.reach[:, None].expand(-1, num_rows, -1).contiguous(),
            bounds,
        )

    def move(self, num_rows: int, sources: torch.Tensor, is_kept: torch.Tensor) -> None:
        """Of `num_rows` rows row sources[i] becomes row i; it is emptied where is_kept[i] is 0."""
        old, new = self._shape.of_blocks(num_rows), self._shape.of_blocks(len(sources))
        came = _first(self._left_out, old).copy_(_first(self._skips, old))
        skips = _first(self._skips, new)
        torch.index_select(came, 1, sources, out=skips)
        skips.mul_(is_kept[:, None, None])


class SkipRows:
    """Which row of a step is whose list. A sequence's moves with it; one that comes, or comes back
    after it was preempted, begins with an empty one."""

    def __init__(self, groups: Items[GroupSkips]) -> None:
        self._groups = groups
        self._rows: Rows = []
        self._size = 1

    def arrange(self, sequences: Items[Sequence], size: int) -> None:
        """size: of the step, with rows that only pad it."""
        rows = [(each, each.num_preemptions) for each in sequences]
        if rows == self._rows and size == self._size:
            return
        were = {row: place for place, row in enumerate(self._rows)}
        sources = [were.get(row, EMPTY) for row in rows] + [EMPTY] * (size - len(rows))
        device = self._groups[0].reach.device
        places, is_kept = upload(
            [[max(0, each) for each in sources], [int(each != EMPTY) for each in sources]], device
        )
        for group in self._groups:
            group.move(self._size, places, is_kept.int())
        self._rows, self._size = rows, size


def _first(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return flat[: prod(shape)].view(shape)
