"""Rank 0 of several: it alone schedules, and says what it is about to compute before it does."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from engine.execution.block_moves import moves_of
from engine.outputs import SampledTokens
from engine.ranks.moves_file import MovesFile
from engine.ranks.plan import PlannedChunk, encode_plan
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence
from engine.sequence import Sequence, SequenceStatus


class PlanSink(Protocol):
    def publish(self, plan: bytes) -> None:
        """Raises RankLost."""


class BatchRunner(Protocol):
    def execute(self, batch: ScheduledBatch) -> SampledTokens: ...


class LeadingExecutor:
    """An Executor. Raises RankLost."""

    def __init__(self, runner: BatchRunner, plans: PlanSink, num_ranks: int) -> None:
        self._runner = runner
        self._plans = plans
        self._num_ranks = num_ranks
        self._writer = PlanWriter()

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        with self._moves_file(batch) as file:
            if file is not None:
                self._plans.publish(file.notice)
            self._plans.publish(encode_plan(self._writer.plan(batch)))
            return self._runner.execute(batch)  # not before all ranks have moved their blocks

    def _moves_file(self, batch: ScheduledBatch) -> MovesFile | nullcontext[None]:
        moves = [moves_of(batch, rank) for rank in range(1, self._num_ranks)]
        return MovesFile(moves) if moves[0] else nullcontext()


@dataclass(slots=True)
class _Told:
    """What the others know of a sequence."""

    slot: int
    block_table: list[int] = field(default_factory=list)
    sampled_position: int | None = None  # of the token they sampled for it last


class PlanWriter:
    """Turns batches into differences. Every plan it made must reach every follower, in order.

    A sequence has a slot from its first chunk until it is preempted or has finished.
    """

    def __init__(self) -> None:
        self._told: dict[Sequence, _Told] = {}
        self._free_slots: list[int] = []
        self._new_slots = count()

    def plan(self, batch: ScheduledBatch) -> tuple[PlannedChunk, ...]:
        self._forget_stopped()
        return tuple(self._plan_chunk(entry) for entry in batch.scheduled)

    def _forget_stopped(self) -> None:
        stopped = [each for each in self._told if each.status is not SequenceStatus.RUNNING]
        for sequence in stopped:
            self._free_slots.append(self._told.pop(sequence).slot)

    def _plan_chunk(self, entry: ScheduledSequence) -> PlannedChunk:
        told = self._told.get(entry.sequence)
        if told is None:
            told = self._told[entry.sequence] = _Told(self._take_slot())
        is_known = entry.num_new_tokens == 1 and entry.start == told.sampled_position
        num_kept = _num_common(told.block_table, entry.block_table)
        chunk = PlannedChunk(
            slot=told.slot,
            start=entry.start,
            num_new_tokens=entry.num_new_tokens,
            token_ids=None if is_known else tuple(entry.new_token_ids),
            num_kept_blocks=num_kept,
            new_blocks=tuple(entry.block_table[num_kept:]),
            samples=entry.samples,
        )
        told.block_table = list(entry.block_table)
        told.sampled_position = entry.end if entry.samples else None
        return chunk

    def _take_slot(self) -> int:
        return self._free_slots.pop() if self._free_slots else next(self._new_slots)


def _num_common(one: list[int], other: list[int]) -> int:
    """Length of the common head. Tables mostly grow at their end, so that is tried first."""
    if other[: len(one)] == one:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (left, right) in pairs if left != right), min(len(one), len(other)))
