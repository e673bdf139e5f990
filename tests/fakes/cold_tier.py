"""A cold tier in this process: answers as late as its script says, forgets and decays when told."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from engine.cache.tiers import ColdBlock, ColdTierCounters, Payload, RestoredPrefix, checksum


class FakeColdTier:
    """The client of one engine with one rank; `stored`, payload and checksum by tenant and hash,
    outlives it. `delays` gives, for one restore after the other, the polls before its answer, None
    for an answer that never comes; 0 when it has run out."""

    def __init__(
        self,
        delays: Iterable[int | None] = (),
        stored: dict[tuple[bytes, bytes], tuple[bytes, int]] | None = None,
    ) -> None:
        self.stored = {} if stored is None else stored
        self.requests: dict[int, tuple[bytes, tuple[bytes, ...]]] = {}  # not answered yet
        self.waits_s: list[float] = []
        self.is_full = False
        self._delays: Iterator[int | None] = iter(delays)
        self._num_polls_left: dict[int, int | None] = {}
        self._num_tickets = 0
        self._counters = ColdTierCounters()

    @property
    def counters(self) -> ColdTierCounters:
        return replace(self._counters)

    def spill(self, blocks: Sequence[ColdBlock]) -> None:
        assert blocks, "nothing was spilled"
        if self.is_full:
            self._counters.dropped += len(blocks)
            return
        self._counters.spilled += len(blocks)
        for block in blocks:
            payload = bytes(block.payload)
            self.stored[block.tenant, block.block_hash] = payload, checksum(payload)

    def request_restore(self, ticket: int, tenant: bytes, hashes: Sequence[bytes]) -> None:
        assert hashes, "nothing was asked for"
        assert ticket >= self._num_tickets, f"ticket {ticket} is used twice"
        self._num_tickets = ticket + 1
        self.requests[ticket] = tenant, tuple(hashes)
        self._num_polls_left[ticket] = next(self._delays, 0)

    def cancel_restore(self, ticket: int) -> None:
        self.requests.pop(ticket, None)

    def poll(self) -> list[RestoredPrefix]:
        answers = []
        for ticket, (tenant, hashes) in list(self.requests.items()):
            num_left = self._num_polls_left[ticket]
            if num_left == 0:
                del self.requests[ticket]
                answers.append(RestoredPrefix(ticket, self._find(tenant, hashes)))
            elif num_left is not None:
                self._num_polls_left[ticket] = num_left - 1
        return answers

    def wait(self, timeout_s: float) -> None:
        self.waits_s.append(timeout_s)

    def forget(self, index: int) -> None:
        """Lose one block."""
        if self.stored:
            del self.stored[list(self.stored)[index % len(self.stored)]]

    def damage(self, index: int) -> None:
        """Turn one bit of a block, or cut it short."""
        if not self.stored:
            return
        address = list(self.stored)[index % len(self.stored)]
        payload, crc = self.stored[address]
        damaged = payload[:-1] if index % 2 else bytes([payload[0] ^ 1]) + payload[1:]
        self.stored[address] = damaged, crc

    def _find(self, tenant: bytes, hashes: tuple[bytes, ...]) -> tuple[tuple[Payload, ...], ...]:
        found: list[tuple[Payload, ...]] = []
        for block_hash in hashes:
            payload, crc = self.stored.get((tenant, block_hash), (b"", 0))
            if checksum(payload) != crc:
                self._counters.corrupt += 1
                break
            if not payload:
                break
            found.append((payload,))
        self._counters.restored += len(found)
        self._counters.missed += len(hashes) - len(found)
        return tuple(found)
