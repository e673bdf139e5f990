"""An engine's way to the cold stores: the engine's ColdTier.

Two threads carry blocks there and back. Whatever goes wrong, the engine sees a miss and a count.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from deployments.cold_store import ChainQuery, PartLabel, PartLocation
from deployments.node_stores import Chunks, Store, StoreUnavailable
from engine.cache.tiers import ColdBlock, ColdTierCounters, Payload, RestoredPrefix, checksum

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 10.0
MAX_QUEUED_BYTES = 256 << 20
MAX_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Request:
    ticket: int
    tenant: bytes
    hashes: tuple[bytes, ...]


class ColdClient:
    """The ColdTier of one rank: spills its own part of blocks, restores those of all `num_ranks`.

    `stores` gives the stores to ask, the node's own first; only that one is spilled to. What waits
    to be sent is found too, except by other ranks.
    """

    def __init__(
        self,
        stores: Callable[[], Sequence[Store]],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._stores = stores
        self._rank = rank
        self._num_ranks = num_ranks
        self._max_queued_bytes = max_queued_bytes
        self._changed = threading.Condition()  # guards all that follows
        self._counters = ColdTierCounters()
        self._queued: deque[ColdBlock] = deque()
        self._unsent: dict[tuple[bytes, bytes], Payload] = {}  # queued, or on its way
        self._num_queued_bytes = 0
        self._requests: dict[int, Request] = {}  # neither answered nor cancelled
        self._unread: deque[int] = deque()  # tickets that nobody looks for yet
        self._answers: list[RestoredPrefix] = []
        self._is_closed = False
        self._threads = [
            threading.Thread(target=run, name=f"cold-{name}", daemon=True)
            for name, run in (("spill", self._run_spills), ("restore", self._run_restores))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def counters(self) -> ColdTierCounters:
        with self._changed:
            return replace(self._counters)

    def spill(self, blocks: Sequence[ColdBlock]) -> None:
        with self._changed:
            for block in blocks:
                num_bytes = len(block.payload)
                if self._num_queued_bytes + num_bytes > self._max_queued_bytes:
                    self._counters.dropped += 1
                    continue
                self._num_queued_bytes += num_bytes
                self._queued.append(block)
                self._unsent[block.tenant, block.block_hash] = block.payload
            self._changed.notify_all()

    def request_restore(self, ticket: int, tenant: bytes, hashes: Sequence[bytes]) -> None:
        with self._changed:
            self._requests[ticket] = Request(ticket, tenant, tuple(hashes))
            self._unread.append(ticket)
            self._changed.notify_all()

    def cancel_restore(self, ticket: int) -> None:
        with self._changed:
            request = self._requests.pop(ticket, None)
            if request is not None:
                self._counters.missed += len(request.hashes)

    def poll(self) -> list[RestoredPrefix]:
        with self._changed:
            answers, self._answers = self._answers, []
            return answers

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._answers, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything handed over is sent or dropped; False if it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_queued_bytes, timeout_s)

    def close(self) -> None:
        """End the threads; what was not sent is lost. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)

    def _run_spills(self) -> None:
        while blocks := self._next_spills():
            num_kept = 0
            try:
                num_kept = self._send(blocks)
            except StoreUnavailable as exc:
                logger.warning("cold spill dropped num_blocks=%d error=%s", len(blocks), exc)
            except Exception:  # the batch is lost, the thread is not
                logger.exception("cold spill failed num_blocks=%d", len(blocks))
            with self._changed:
                self._counters.spilled += num_kept
                self._counters.dropped += len(blocks) - num_kept
                for block in blocks:
                    self._num_queued_bytes -= len(block.payload)
                    self._unsent.pop((block.tenant, block.block_hash), None)
                self._changed.notify_all()

    def _next_spills(self) -> list[ColdBlock]:
        """A batch, at least one block; empty when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._is_closed)
            batch: list[ColdBlock] = []
            num_bytes = 0
            while self._queued and not self._is_closed and num_bytes < MAX_BATCH_BYTES:
                batch.append(self._queued.popleft())
                num_bytes += len(batch[-1].payload)
            return batch

    def _send(self, blocks: list[ColdBlock]) -> int:
        """How many of the blocks the store has now. Those it has are not sent again."""
        payloads = {(b.tenant, b.block_hash, self._rank): b.payload for b in blocks}
        store = self._stores()[0]
        keys = store.missing(list(payloads))
        num_kept = len(blocks) - len(keys)
        if keys:
            labels = [PartLabel(k, len(payloads[k]), checksum(payloads[k])) for k in keys]
            content = np.concatenate([np.frombuffer(payloads[k], np.uint8) for k in keys])
            num_kept += store.store(labels, content)
        return num_kept

    def _run_restores(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unread or self._is_closed)
                if self._is_closed:
                    return
                wanted = [self._requests[t] for t in self._unread if t in self._requests]
                self._unread.clear()
                chains = [Chain(request, self._num_ranks) for request in wanted]
                for chain in chains:
                    chain.add_unsent(self._unsent)
            try:
                self._restore(chains)
            except Exception:  # what was found is answered, the rest is missed
                logger.exception("cold restore failed num_sequences=%d", len(chains))
            self._answer(chains)

    def _restore(self, chains: list["Chain"]) -> None:
        for store in self._stores():
            unfinished = [chain for chain in chains if not chain.is_whole]
            if unfinished:
                self._restore_from(store, unfinished)

    def _restore_from(self, store: Store, chains: list["Chain"]) -> None:
        try:
            lease = store.find([chain.query for chain in chains], self._num_ranks)
            content = store.fetch(lease.chunks)
        except StoreUnavailable as exc:
            logger.warning("cold restore missed num_sequences=%d error=%s", len(chains), exc)
            return
        lost = lease.chunks.keys() - content.keys()
        for chain, found in zip(chains, lease.found, strict=True):
            lost |= chain.add_found(found, content)
        if lease.chunks:
            store.release(lease.lease_id)
        if lost:
            store.discard(lost)

    def _answer(self, chains: list["Chain"]) -> None:
        with self._changed:
            for chain in chains:
                request, num_found = chain.request, len(chain.blocks)
                self._counters.corrupt += chain.num_corrupt
                if self._requests.pop(request.ticket, None) is None:  # cancelled, and counted
                    continue
                self._counters.restored += num_found
                self._counters.missed += len(request.hashes) - num_found
                self._answers.append(RestoredPrefix(request.ticket, tuple(chain.blocks)))
            self._changed.notify_all()


class Chain:
    """One request and the leading blocks found so far."""

    def __init__(self, request: Request, num_ranks: int) -> None:
        self.request = request
        self.blocks: list[tuple[Payload, ...]] = []
        self.num_corrupt = 0
        self._num_ranks = num_ranks
        self._unsent: dict[bytes, Payload] = {}

    @property
    def is_whole(self) -> bool:
        return len(self.blocks) == len(self.request.hashes)

    @property
    def query(self) -> ChainQuery:
        return ChainQuery(self.request.tenant, self.request.hashes[len(self.blocks) :])

    def add_unsent(self, unsent: Mapping[tuple[bytes, bytes], Payload]) -> None:
        """Blocks of this process that are on their way out: whole if this rank is the only one."""
        if self._num_ranks == 1:
            for block_hash in self.request.hashes:
                payload = unsent.get((self.request.tenant, block_hash))
                if payload is not None:
                    self._unsent[block_hash] = payload
            self._extend_by_unsent()

    def add_found(self, found: Sequence[tuple[PartLocation, ...]], content: Chunks) -> set[int]:
        """Add blocks up to the first with a lost or damaged part; the chunks of damaged ones."""
        for places in found:
            payloads = tuple(_read(place, content) for place in places)
            whole = tuple(payload for payload in payloads if payload is not None)
            if len(whole) < len(places):
                damaged = {
                    place.chunk_id
                    for place, payload in zip(places, payloads, strict=True)
                    if payload is None and place.chunk_id in content
                }
                self.num_corrupt += bool(damaged)
                return damaged
            self.blocks.append(whole)
        self._extend_by_unsent()
        return set()

    def _extend_by_unsent(self) -> None:
        for block_hash in self.query.hashes:
            if block_hash not in self._unsent:
                break
            self.blocks.append((self._unsent[block_hash],))


def _read(place: PartLocation, content: Chunks) -> Payload | None:
    """None where the chunk is lost, too short, or not what was stored."""
    if place.chunk_id not in content:
        return None
    payload = content[place.chunk_id][place.offset : place.offset + place.label.num_bytes].data
    is_intact = len(payload) == place.label.num_bytes and checksum(payload) == place.label.checksum
    return payload if is_intact else None
