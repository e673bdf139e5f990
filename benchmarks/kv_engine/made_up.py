"""A decode over keys and values that nobody computed: planned by hand, launched past the engine."""

import itertools
import statistics
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from benchmarks.errors import MeasurementFailed
from engine.cache.formats import BLOCK_SIZE, MAX_SLABS, Part
from engine.cache.guarded_queue import Ids
from engine.cache.tiered_span import View
from engine.errors import ArenaExhausted
from engine.execution.model_runner import ModelRunner
from engine.execution.tiered_kv import TieredKV
from engine.ranks.group import SINGLE_RANK
from engine.scheduling.batch import ScheduledBatch
from engine.step_profile import tiered_steps
from engine.tiering import arena_groups

MAX_SCALE = 0.01  # of a code of at most 255: keys and values up to a few
SEED = 1


@dataclass(frozen=True, slots=True)
class MadeUpStep:
    """One token of one sequence, over slabs of random bytes and scales. It begins no block, so it
    demotes nothing and can be launched again and again."""

    runner: ModelRunner
    batch: ScheduledBatch

    @classmethod
    def of(cls, runner: ModelRunner, context: int) -> Self:
        """`context` counts the token itself. Overwrites the whole cache. Raises MeasurementFailed
        where so many tokens do not fit, or do not age."""
        kv = runner._kv
        if not isinstance(kv, TieredKV):
            raise MeasurementFailed("expected a tiered cache to make up")
        try:
            batch = tiered_steps(arena_groups(kv.groups, b"", SINGLE_RANK))((1, 1, context - 1))
        except ArenaExhausted as exc:
            raise MeasurementFailed(f"{context} tokens do not fit: {exc}") from exc
        if any(batch.demotions):
            raise MeasurementFailed(f"token {context - 1} begins a block; choose one inside")
        make_up(kv, batch.scheduled[0].spans[0].views)
        return cls(runner, batch)

    def median_gap_ms(self, num_steps: int) -> float:
        """Between the ends of steps in a row, each launched while the one before it computes, as
        `Engine.step` does where it can."""
        pending, ends_s = self.runner.launch(self.batch), []
        for _ in range(num_steps):
            ahead = self.runner.launch(self.batch)
            pending()
            ends_s.append(time.perf_counter())
            pending = ahead
        pending()
        return 1e3 * statistics.median(
            end_s - start_s for start_s, end_s in itertools.pairwise(ends_s)
        )


@torch.inference_mode()
def make_up(kv: TieredKV, views: Items[View]) -> None:
    """Random codes and scales in every slab, and numbers in those that the views have in bf16."""
    generator = torch.Generator(kv.device).manual_seed(SEED)
    for layer, slabs in enumerate(kv.layers):
        view = views[kv.group_of[layer]]
        for part, payload, meta in (
            (Part.KEYS, slabs.keys, slabs.key_meta),
            (Part.VALUES, slabs.values, slabs.value_meta),
        ):
            payload.random_(0, 256, generator=generator)
            meta.uniform_(0.0, MAX_SCALE, generator=generator)
            ids = torch.from_numpy(bf16_slabs(view, part)).to(kv.device)
            shape = (len(ids), kv.num_kv_heads, BLOCK_SIZE // MAX_SLABS * kv.head_dim)
            numbers = torch.randn(shape, generator=generator, device=kv.device)
            payload[ids] = numbers.bfloat16().view(torch.uint8)


def bf16_slabs(view: View, part: Part) -> Ids:
    """Of the sink and of the hot run: the head and the tail of the column."""
    column, (sink, _, warm, end) = view.slabs(part), view.bounds
    num_hot = -(-(end - warm) // BLOCK_SIZE)
    return np.concatenate(
        (column[: sink // BLOCK_SIZE * MAX_SLABS], column[len(column) - num_hot * MAX_SLABS :])
    )
