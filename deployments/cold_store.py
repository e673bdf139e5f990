"""The cold tier's store: on each node a detached actor that keeps evicted KV blocks as Ray objects.

It puts them itself, in chunks, so that they outlive the engine that sent them. It promises nothing:
its death, a lost object or a full house only mean that somebody computes again.
"""

import contextlib
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "flashray"
NAME_PREFIX = "flashray-cold-store-"
DRAIN_TIMEOUT_S = 10.0

Key = tuple[bytes, bytes, int]  # tenant, block hash, rank


@dataclass(frozen=True, slots=True)
class ColdStoreLimits:
    """`max_bytes` of all tenants, `max_tenant_bytes` of each. Blocks of one tenant are put as one
    object once they fill `chunk_bytes`; a lease holds its chunks for at most `lease_s`."""

    max_bytes: int
    max_tenant_bytes: int
    chunk_bytes: int = 4 << 20
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class PartLabel:
    """What travels with one rank's part of a block."""

    key: Key
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class PartLocation:
    chunk_id: int
    offset: int
    label: PartLabel


@dataclass(frozen=True, slots=True)
class ChainQuery:
    """Consecutive blocks of one chain."""

    tenant: bytes
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """For each query, of each leading block that every rank has, the places by rank. `chunks` holds
    an ObjectRef, or the bytes themselves while the chunk is still being filled."""

    lease_id: int
    found: tuple[tuple[tuple[PartLocation, ...], ...], ...]
    chunks: dict[int, Any]


@dataclass(frozen=True, slots=True)
class ColdStoreStats:
    num_parts: int
    num_chunks: int
    num_bytes: int
    num_unsealed_bytes: int  # of them in the actor's own memory
    num_tenants: int
    num_leases: int
    evicted_parts_total: int
    refused_parts_total: int  # too large, or all that could give way was leased


@dataclass(slots=True)
class Chunk:
    """Blocks of one tenant, in memory until `ref` is their object."""

    chunk_id: int
    tenant: bytes
    keys: list[Key] = field(default_factory=list)
    buffer: bytearray = field(default_factory=bytearray)
    num_bytes: int = 0
    ref: Any = None
    num_leases: int = 0


class ColdStore:
    """The actor; one call at a time. The chunk is the unit of eviction, least recently used first,
    so no byte of a chunk is ever dead: the waste is what is evicted beyond need, less than a chunk
    and a block an eviction. A chunk has one tenant, so quota and isolation are whole objects too.
    """

    def __init__(
        self,
        limits: ColdStoreLimits,
        put: Callable[[NDArray[np.uint8]], Any] = ray.put,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._put = put
        self._clock = clock
        self._is_draining = False
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()  # least recently used first
        self._unsealed: dict[bytes, Chunk] = {}  # by tenant
        self._places: dict[Key, PartLocation] = {}
        self._num_bytes: Counter[bytes] = Counter()  # by tenant
        self._leases: OrderedDict[int, tuple[float, set[int]]] = OrderedDict()  # by expiry
        self._totals: Counter[str] = Counter()
        self._next_ids: defaultdict[str, int] = defaultdict(int)

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Those of `keys` worth sending. The others count as just used."""
        for chunk_id in {self._places[key].chunk_id for key in keys if key in self._places}:
            self._chunks.move_to_end(chunk_id)
        return [key for key in keys if key not in self._places]

    def store(self, labels: Sequence[PartLabel], content: NDArray[np.uint8]) -> int:
        """Keep the parts that lie one after the other in `content`; how many are kept. A part that
        is here already is. Refuses what the limits leave no room for."""
        assert sum(label.num_bytes for label in labels) == content.nbytes
        self._expire_leases()
        num_kept, offset = 0, 0
        for label in labels:
            payload = content[offset : offset + label.num_bytes]
            offset += label.num_bytes
            num_kept += label.key in self._places or self._keep(label, payload)
        self._totals["refused"] += len(labels) - num_kept
        return num_kept

    def find(self, queries: Sequence[ChainQuery], num_ranks: int) -> Lease:
        """Lease the chunks of all leading blocks found. The caller releases the lease."""
        self._expire_leases()
        found = tuple(self._lead(query, num_ranks) for query in queries)
        chunk_ids = {part.chunk_id for blocks in found for parts in blocks for part in parts}
        lease_id = self._next("lease")
        if chunk_ids:
            self._leases[lease_id] = self._clock() + self._limits.lease_s, chunk_ids
        for chunk_id in chunk_ids:
            self._chunks[chunk_id].num_leases += 1
            self._chunks.move_to_end(chunk_id)
        return Lease(lease_id, found, {i: _content(self._chunks[i]) for i in chunk_ids})

    def release(self, lease_id: int) -> None:
        """Idempotent."""
        _, chunk_ids = self._leases.pop(lease_id, (0.0, set()))
        for chunk_id in chunk_ids & self._chunks.keys():
            self._chunks[chunk_id].num_leases -= 1

    def discard(self, chunk_ids: Iterable[int]) -> None:
        """Forget chunks that turned out lost or damaged. Idempotent."""
        for chunk_id in self._chunks.keys() & set(chunk_ids):
            self._remove(self._chunks[chunk_id])

    def stats(self) -> ColdStoreStats:
        return ColdStoreStats(
            num_parts=len(self._places),
            num_chunks=len(self._chunks),
            num_bytes=self._num_bytes.total(),
            num_unsealed_bytes=sum(chunk.num_bytes for chunk in self._unsealed.values()),
            num_tenants=len(self._num_bytes),
            num_leases=len(self._leases),
            evicted_parts_total=self._totals["evicted"],
            refused_parts_total=self._totals["refused"],
        )

    def drain(self) -> None:
        """Drop everything and take nothing more. Idempotent."""
        self._is_draining = True
        self.discard(tuple(self._chunks))
        self._leases.clear()

    def _lead(self, query: ChainQuery, num_ranks: int) -> tuple[tuple[PartLocation, ...], ...]:
        blocks = []
        for block_hash in query.hashes:
            keys = [(query.tenant, block_hash, rank) for rank in range(num_ranks)]
            if not all(key in self._places for key in keys):
                break
            blocks.append(tuple(self._places[key] for key in keys))
        return tuple(blocks)

    def _keep(self, label: PartLabel, payload: NDArray[np.uint8]) -> bool:
        tenant = label.key[0]
        if self._is_draining or not self._make_room(tenant, label.num_bytes):
            return False
        chunk = self._unsealed.get(tenant)
        if chunk is None:
            chunk = self._unsealed[tenant] = Chunk(self._next("chunk"), tenant)
            self._chunks[chunk.chunk_id] = chunk
        self._places[label.key] = PartLocation(chunk.chunk_id, chunk.num_bytes, label)
        chunk.keys.append(label.key)
        chunk.buffer += payload.data
        chunk.num_bytes += label.num_bytes
        self._num_bytes[tenant] += label.num_bytes
        self._chunks.move_to_end(chunk.chunk_id)
        if chunk.num_bytes >= self._limits.chunk_bytes:
            self._seal(chunk)
        return True

    def _seal(self, chunk: Chunk) -> None:
        chunk.ref = self._put(np.frombuffer(chunk.buffer, np.uint8))
        chunk.buffer = bytearray()
        del self._unsealed[chunk.tenant]

    def _make_room(self, tenant: bytes, num_bytes: int) -> bool:
        """Evict until the part fits; the tenant's own chunks where its quota is the limit."""
        limits = self._limits
        if num_bytes > min(limits.max_tenant_bytes, limits.max_bytes):
            return False
        while self._num_bytes[tenant] + num_bytes > limits.max_tenant_bytes:
            if not self._evict(lambda chunk: chunk.tenant == tenant):
                return False
        while self._num_bytes.total() + num_bytes > limits.max_bytes:
            if not self._evict(lambda chunk: True):
                return False
        return True

    def _evict(self, may_go: Callable[[Chunk], bool]) -> bool:
        """Remove the least recently used chunk of those; False when all are leased."""
        for chunk in self._chunks.values():
            if chunk.num_leases == 0 and may_go(chunk):
                self._totals["evicted"] += len(chunk.keys)
                self._remove(chunk)
                return True
        return False

    def _remove(self, chunk: Chunk) -> None:
        """Ray frees the object with its last reference: here, or in a reader that still copies."""
        del self._chunks[chunk.chunk_id]
        for key in chunk.keys:
            del self._places[key]
        if self._unsealed.get(chunk.tenant) is chunk:
            del self._unsealed[chunk.tenant]
        self._num_bytes[chunk.tenant] -= chunk.num_bytes
        if not self._num_bytes[chunk.tenant]:
            del self._num_bytes[chunk.tenant]

    def _expire_leases(self) -> None:
        """A reader that died never releases."""
        while self._leases:
            lease_id, (expires_s, _) = next(iter(self._leases.items()))
            if self._clock() < expires_s:
                break
            self.release(lease_id)

    def _next(self, kind: str) -> int:
        self._next_ids[kind] += 1
        return self._next_ids[kind]


def cold_store_actor(limits: ColdStoreLimits) -> Any:
    """The store of this node, started if need be; a later caller's `limits` change nothing.
    Restarted by Ray when it dies, empty."""
    node_id = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(ColdStore)
        .options(
            name=f"{NAME_PREFIX}{node_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(limits)
    )


def other_cold_stores() -> list[Any]:
    """The stores of the other nodes that are up."""
    own = f"{NAME_PREFIX}{ray.get_runtime_context().get_node_id()}"
    return [actor for name, actor in _named_stores() if name != own]


def end_cold_stores() -> None:
    """Drain and end the stores of all nodes: at the end of an app, not at a redeployment."""
    for _, actor in _named_stores():
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(actor.drain.remote(), timeout=DRAIN_TIMEOUT_S)
        ray.kill(actor)


def _named_stores() -> list[tuple[str, Any]]:
    found = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(NAME_PREFIX):
            with contextlib.suppress(ValueError):  # it ended meanwhile
                found.append((entry["name"], ray.get_actor(entry["name"], namespace=NAMESPACE)))
    return found


def _content(chunk: Chunk) -> Any:
    """A copy of a chunk that is still being filled: its buffer moves when it grows."""
    return np.array(np.frombuffer(chunk.buffer, np.uint8)) if chunk.ref is None else chunk.ref
