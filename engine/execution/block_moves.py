"""What one rank has to move before it computes a step."""

from dataclasses import dataclass

from engine.cache.tiers import BlockSpill, Payload
from engine.scheduling.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """First every block of `spills` is copied out; then `payloads` are written into
    `restored_ids`, one each, no block twice."""

    spills: tuple[BlockSpill, ...] = ()
    restored_ids: tuple[int, ...] = ()
    payloads: tuple[Payload, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.spills or self.restored_ids)


def moves_of(batch: ScheduledBatch, rank: int) -> BlockMoves:
    # A block that was placed and evicted within one plan is not written yet when spills are copied;
    # the tier has what it has just given.
    restored = {restore.block_hash for restore in batch.restores}
    spills = tuple(spill for spill in batch.spills if spill.block_hash not in restored)
    last = {restore.block_id: restore.payloads[rank] for restore in batch.restores}
    return BlockMoves(spills, tuple(last), tuple(last.values()))
