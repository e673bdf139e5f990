"""Every rank but the first: it computes what it is told, and decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from engine.execution.block_moves import BlockMoves
from engine.ranks.moves_file import is_notice, read_moves
from engine.ranks.plan import PlannedChunk, decode_plan


@dataclass(frozen=True, slots=True)
class FollowedChunk:
    """As its ScheduledSequence on rank 0 looked when the step was planned."""

    slot: int
    start: int
    new_token_ids: tuple[int, ...]
    block_table: list[int]
    samples: bool

    @property
    def num_new_tokens(self) -> int:
        return len(self.new_token_ids)

    @property
    def end(self) -> int:
        return self.start + len(self.new_token_ids)


@dataclass(frozen=True, slots=True)
class FollowedBatch:
    scheduled: tuple[FollowedChunk, ...]


class FollowingRunner(Protocol):
    @property
    def rank(self) -> int: ...

    def move_blocks(self, moves: BlockMoves) -> None:
        """What a step moves, before the `follow` for that step."""

    def follow(self, batch: FollowedBatch) -> list[int]:
        """The token ids that rank 0 sampled, one for each chunk that samples, in order."""


class PlanSource(Protocol):
    def read(self) -> bytes:
        """The next plan; waits for it. Raises RankLost when there will be none."""


@dataclass(slots=True)
class _Slot:
    block_table: list[int] = field(default_factory=list)
    sampled_token_id: int | None = None


class FollowerBooks:
    """What a rank keeps from plan to plan: of every slot its blocks and its last sampled token."""

    def __init__(self) -> None:
        self._slots: dict[int, _Slot] = {}

    def open(self, chunks: Sequence[PlannedChunk]) -> FollowedBatch:
        """The plan with everything that it left out."""
        return FollowedBatch(tuple(self._complete(chunk) for chunk in chunks))

    def close(self, batch: FollowedBatch, sampled_token_ids: Sequence[int]) -> None:
        sampling = [chunk for chunk in batch.scheduled if chunk.samples]
        for chunk, token_id in zip(sampling, sampled_token_ids, strict=True):
            self._slots[chunk.slot].sampled_token_id = token_id

    def _complete(self, chunk: PlannedChunk) -> FollowedChunk:
        slot = self._slots.setdefault(chunk.slot, _Slot())
        slot.block_table[chunk.num_kept_blocks :] = chunk.new_blocks
        token_ids = chunk.token_ids
        if token_ids is None:
            assert slot.sampled_token_id is not None, f"slot {chunk.slot} has sampled nothing yet"
            token_ids = (slot.sampled_token_id,)
        return FollowedChunk(chunk.slot, chunk.start, token_ids, slot.block_table, chunk.samples)


class FollowerLoop:
    """`run` reads a record, executes it, and so on until rank 0 is gone."""

    def __init__(self, runner: FollowingRunner, plans: PlanSource) -> None:
        self._runner = runner
        self._plans = plans
        self._books = FollowerBooks()

    def run(self) -> NoReturn:
        """Raises RankLost."""
        while True:
            self._execute(self._plans.read())

    def _execute(self, record: bytes) -> None:
        if is_notice(record):
            self._runner.move_blocks(read_moves(record, self._runner.rank))
            return
        batch = self._books.open(decode_plan(record))
        self._books.close(batch, self._runner.follow(batch))
