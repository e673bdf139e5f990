"""A ColdStore in this process, its objects in a list; a Store that fails or stalls when told."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deployments.cold_store import ChainQuery, ColdStore, ColdStoreLimits, Key, Lease, PartLabel
from deployments.node_stores import Chunks, StoreUnavailable


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Ref:
    """An object of the fake object store: its place in `objects`."""

    index: int


class InProcessStore:
    """`objects` can be damaged in place, or lost by setting one to None."""

    def __init__(self, limits: ColdStoreLimits) -> None:
        self.clock = FakeClock()
        self.objects: list[NDArray[np.uint8] | None] = []
        self.num_sent = 0
        self.is_down = False
        self.gate = threading.Event()
        self.gate.set()
        self.actor = ColdStore(limits, self._put, self.clock)
        self._one_call = threading.Lock()  # as Ray gives an actor one call at a time

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        self._pass_the_gate()
        with self._one_call:
            return self.actor.missing(keys)

    def store(self, labels: Sequence[PartLabel], content: NDArray[np.uint8]) -> int:
        self._pass_the_gate()
        self.num_sent += len(labels)
        with self._one_call:
            return self.actor.store(labels, content)

    def find(self, queries: Sequence[ChainQuery], num_ranks: int) -> Lease:
        self._pass_the_gate()
        with self._one_call:
            return self.actor.find(queries, num_ranks)

    def fetch(self, chunks: Mapping[int, Any]) -> Chunks:
        content = {}
        for chunk_id, chunk in chunks.items():
            found = self.objects[chunk.index] if isinstance(chunk, Ref) else chunk
            if found is not None:
                content[chunk_id] = found
        return content

    def release(self, lease_id: int) -> None:
        with self._one_call:
            self.actor.release(lease_id)

    def discard(self, chunk_ids: Iterable[int]) -> None:
        with self._one_call:
            self.actor.discard(chunk_ids)

    def _put(self, content: NDArray[np.uint8]) -> Ref:
        self.objects.append(np.array(content))
        return Ref(len(self.objects) - 1)

    def _pass_the_gate(self) -> None:
        assert self.gate.wait(10)
        if self.is_down:
            raise StoreUnavailable("down")
