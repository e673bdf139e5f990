"""Moves cross from rank 0 to the others whole, each with its own payloads."""

import pytest

from engine.cache.tiers import BlockRestore, BlockSpill
from engine.errors import RankLost
from engine.execution.block_moves import BlockMoves, moves_of
from engine.ranks.moves_file import MovesFile, is_notice, read_moves
from engine.ranks.plan import encode_plan
from engine.scheduling.batch import ScheduledBatch

ONE, OTHER, THIRD = (bytes([number]) * 16 for number in (1, 2, 3))


def restored(block_id: int, block_hash: bytes, size: int = 3) -> BlockRestore:
    payloads = tuple(bytes([block_id, rank]) * 500 for rank in range(size))
    return BlockRestore(block_id, block_hash, payloads)


def batch_of(spills: tuple[BlockSpill, ...], restores: tuple[BlockRestore, ...]) -> ScheduledBatch:
    return ScheduledBatch((), (), spills, restores)


SPILLS = (BlockSpill(7, ONE, b"red"), BlockSpill(70_000, OTHER, b""))
RESTORES = (restored(7, THIRD), restored(2, b"\4" * 16))


@pytest.mark.parametrize(("spills", "restores"), [(SPILLS, RESTORES), (SPILLS, ()), ((), RESTORES)])
def test_every_rank_gets_its_part(spills, restores):
    batch = batch_of(spills, restores)
    moves = [moves_of(batch, rank) for rank in (1, 2)]
    with MovesFile(moves) as file:
        assert is_notice(file.notice)
        notice = file.notice
        assert [read_moves(notice, rank) for rank in (1, 2)] == moves
    assert moves[0].spills == spills
    assert len(moves[0].restored_ids) == len(restores)
    with pytest.raises(RankLost, match="rank 0 is gone"):
        read_moves(notice, 1)


def test_a_plan_is_no_notice():
    assert not is_notice(encode_plan(()))


def test_a_block_that_is_restored_in_the_same_plan_is_not_spilled():
    """Placed and evicted within one plan: when spills are copied it holds other tokens yet."""
    batch = batch_of((BlockSpill(7, THIRD, b"red"), SPILLS[0]), RESTORES)
    assert moves_of(batch, 0).spills == (SPILLS[0],)


def test_of_two_restores_into_one_block_the_last_is_written():
    last = restored(7, OTHER)
    moves = moves_of(batch_of((), (restored(7, ONE), restored(3, THIRD), last)), 1)
    assert dict(zip(moves.restored_ids, moves.payloads, strict=True)) == {
        3: restored(3, THIRD).payloads[1],
        7: last.payloads[1],
    }


def test_a_step_without_moves_has_none():
    assert not moves_of(batch_of((), ()), 0)
    assert moves_of(batch_of((), RESTORES), 0) == BlockMoves(
        (), (7, 2), tuple(restore.payloads[0] for restore in RESTORES)
    )
