"""The cold tier as the engine sees it: full blocks by content address, somewhere outside the GPU.

The engine hands blocks over before it overwrites them and asks for them by address. It never waits:
whatever is late, lost or damaged is computed again.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Payload = bytes | bytearray | memoryview  # K and V of all layers of one block, on one rank


@dataclass(frozen=True, slots=True)
class ColdBlock:
    """This rank's part of a block. The address in `block_hash` is already the tenant's own;
    `tenant` says whose quota it fills and is held against the asker's once more."""

    tenant: bytes
    block_hash: bytes
    payload: Payload


@dataclass(frozen=True, slots=True)
class RestoredPrefix:
    """The answer to one ticket: of each leading block that was found whole on every rank, in order,
    the payloads by rank. Empty when the first block was not. The payloads are only read."""

    ticket: int
    blocks: tuple[tuple[Payload, ...], ...]


@dataclass(slots=True)
class ColdTierCounters:
    """Blocks since the start, one count for a block of any number of ranks."""

    spilled: int = 0  # handed over and taken
    dropped: int = 0  # handed over, not taken: the queue was full or the store away
    restored: int = 0  # asked for and answered
    missed: int = 0  # asked for, not answered: evicted, lost, late, or behind such a one
    corrupt: int = 0  # of those missed: found, but not what was stored


class ColdTier(Protocol):
    """Every method returns at once, except `wait`. One thread calls them; the work is done on
    others. No error of the store behind ever reaches the caller."""

    @property
    def counters(self) -> ColdTierCounters: ...

    def spill(self, blocks: Sequence[ColdBlock]) -> None:
        """Keep these blocks, or drop and count them. Takes the payloads: the caller must not write
        into their memory again."""

    def request_restore(self, ticket: int, tenant: bytes, hashes: Sequence[bytes]) -> None:
        """Look for these consecutive blocks of one chain. `ticket` is never used twice."""

    def cancel_restore(self, ticket: int) -> None:
        """The answer is no longer wanted; it may come all the same. Idempotent."""

    def poll(self) -> list[RestoredPrefix]:
        """The answers that came since the last call, in any order."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until `poll` has an answer, `timeout_s` at most: when nothing else can be done."""


@dataclass(frozen=True, slots=True)
class BlockSpill:
    """The content of a block that gets another owner in this step."""

    block_id: int
    block_hash: bytes
    tenant: bytes


@dataclass(frozen=True, slots=True)
class BlockRestore:
    """What a block must hold before anything is computed in this step: a payload for each rank."""

    block_id: int
    block_hash: bytes
    payloads: tuple[Payload, ...]


def checksum(payload: Payload) -> int:
    """Travels with a payload beside its length. CRC-32 at 7.2 GB/s on one core, blake2b 1.4: it
    guards against decay, not forgery; the address is what keeps tenants apart."""
    return zlib.crc32(payload)
