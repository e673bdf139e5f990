"""Which blocks move in a step, and the restored bytes, from rank 0 to the others.

Too much for the ring, so an anonymous file carries it: the ring only says where that is, in a
record before the step's plan. Rank 0 closes the file once all ranks have moved their blocks.

File, little-endian: `<IIIQ` spills, restored blocks, bytes of the spills' list, bytes of a payload;
each spill as `<I16sI` of block, hash, bytes of its tenant, and the tenant; the restored blocks, 4
bytes each; then the payloads of rank 1 in that order, those of rank 2, and so on.
"""

import os
import struct
from collections.abc import Sequence
from typing import BinaryIO, Self

from engine.cache.tiers import BlockSpill
from engine.errors import RankLost
from engine.execution.block_moves import BlockMoves

NOTICE_VERSION = 0x8001  # where a plan has its own version, which is never so large
_NOTICE = struct.Struct("<HHII")  # version, reserved, process, descriptor
_HEADER = struct.Struct("<IIIQ")
_SPILL = struct.Struct("<I16sI")


class MovesFile:
    """A context manager. `moves` are those of ranks 1, 2, ...: they differ in payloads only."""

    def __init__(self, moves: Sequence[BlockMoves]) -> None:
        self._file = open(os.memfd_create("flashray-moves", os.MFD_CLOEXEC), "wb")  # noqa: SIM115
        first = moves[0]
        spills = b"".join(_encode_spill(spill) for spill in first.spills)
        num_restored = len(first.restored_ids)
        payload_bytes = len(first.payloads[0]) if first.payloads else 0
        self._file.write(_HEADER.pack(len(first.spills), num_restored, len(spills), payload_bytes))
        self._file.write(spills + struct.pack(f"<{num_restored}I", *first.restored_ids))
        for each in moves:
            for payload in each.payloads:
                self._file.write(payload)
        self._file.flush()

    @property
    def notice(self) -> bytes:
        return _NOTICE.pack(NOTICE_VERSION, 0, os.getpid(), self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def is_notice(record: bytes) -> bool:
    return record[:2] == NOTICE_VERSION.to_bytes(2, "little")


def read_moves(notice: bytes, rank: int) -> BlockMoves:
    """What `rank`, not 0, has to move. Raises RankLost when the file is gone with its owner."""
    _, _, pid, descriptor = _NOTICE.unpack(notice)
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            return _read(file, rank)
    except OSError as exc:
        raise RankLost(f"rank 0 is gone, and its moves: {exc}; start the group again") from exc


def _read(file: BinaryIO, rank: int) -> BlockMoves:
    header = file.read(_HEADER.size)
    num_spills, num_restored, spills_bytes, payload_bytes = _HEADER.unpack(header)
    spills = _decode_spills(file.read(spills_bytes), num_spills)
    restored_ids = struct.unpack(f"<{num_restored}I", file.read(4 * num_restored))
    file.seek((rank - 1) * num_restored * payload_bytes, os.SEEK_CUR)
    payloads = tuple(file.read(payload_bytes) for _ in range(num_restored))
    return BlockMoves(spills, restored_ids, payloads)


def _encode_spill(spill: BlockSpill) -> bytes:
    return _SPILL.pack(spill.block_id, spill.block_hash, len(spill.tenant)) + spill.tenant


def _decode_spills(encoded: bytes, num_spills: int) -> tuple[BlockSpill, ...]:
    spills, offset = [], 0
    for _ in range(num_spills):
        block_id, block_hash, tenant_bytes = _SPILL.unpack_from(encoded, offset)
        offset += _SPILL.size + tenant_bytes
        spills.append(BlockSpill(block_id, block_hash, encoded[offset - tenant_bytes : offset]))
    return tuple(spills)
