"""The cold stores as an engine reaches them: its node's first, then those of the other nodes."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from deployments.cold_store import (
    ChainQuery,
    ColdStoreLimits,
    Key,
    Lease,
    PartLabel,
    cold_store_actor,
    other_cold_stores,
)

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
RECONNECT_S = 2.0  # a store that failed is left alone for so long
PEERS_S = 30.0  # how long the list of other nodes' stores is believed

Chunks = dict[int, NDArray[np.uint8]]


class StoreUnavailable(Exception):
    """A store did not answer, or not in time."""


class Store(Protocol):
    """As ColdStore, from far away: every method but `release` and `discard` may raise
    StoreUnavailable."""

    def missing(self, keys: Sequence[Key]) -> list[Key]: ...

    def store(self, labels: Sequence[PartLabel], content: NDArray[np.uint8]) -> int: ...

    def find(self, queries: Sequence[ChainQuery], num_ranks: int) -> Lease: ...

    def fetch(self, chunks: Mapping[int, Any]) -> Chunks:
        """The bytes of a lease's chunks, mapped rather than copied; lost ones are left out."""

    def release(self, lease_id: int) -> None: ...

    def discard(self, chunk_ids: Iterable[int]) -> None: ...


class RayStore:
    """A ColdStore actor behind `connect`, which is called again after a failure, but not before
    RECONNECT_S have passed."""

    def __init__(
        self, connect: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._actor: Any = None
        self._retry_at_s = clock()

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        missing: list[Key] = self._call("missing", keys)
        return missing

    def store(self, labels: Sequence[PartLabel], content: NDArray[np.uint8]) -> int:
        num_kept: int = self._call("store", labels, content)
        return num_kept

    def find(self, queries: Sequence[ChainQuery], num_ranks: int) -> Lease:
        lease: Lease = self._call("find", queries, num_ranks)
        return lease

    def fetch(self, chunks: Mapping[int, Any]) -> Chunks:
        refs = {i: chunk for i, chunk in chunks.items() if isinstance(chunk, ray.ObjectRef)}
        content: Chunks = {i: chunk for i, chunk in chunks.items() if i not in refs}
        if refs:  # all pulls at once
            ray.wait(list(refs.values()), num_returns=len(refs), timeout=CALL_TIMEOUT_S)
        for chunk_id, ref in refs.items():
            try:
                content[chunk_id] = ray.get(ref, timeout=0)
            except RayError as exc:
                logger.warning("cold chunk lost chunk_id=%d error=%r", chunk_id, exc)
        return content

    def release(self, lease_id: int) -> None:
        self._tell("release", lease_id)

    def discard(self, chunk_ids: Iterable[int]) -> None:
        self._tell("discard", tuple(chunk_ids))

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._clock() < self._retry_at_s:
            raise StoreUnavailable("the cold store failed a moment ago")
        try:
            if self._actor is None:
                self._actor = self._connect()
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=CALL_TIMEOUT_S)
        except (RayError, RuntimeError, ValueError) as exc:  # the last two: Ray itself is going
            self._actor = None
            self._retry_at_s = self._clock() + RECONNECT_S
            raise StoreUnavailable(f"{method}: {exc!r}") from exc

    def _tell(self, method: str, argument: Any) -> None:
        actor = self._actor
        if actor is not None:
            getattr(actor, method).remote(argument)


class NodeStores:
    """The stores that an engine asks: its node's, started if need be, then the other nodes'."""

    def __init__(
        self, limits: ColdStoreLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._own = RayStore(lambda: cold_store_actor(limits))
        self._peers: list[RayStore] = []
        self._clock = clock
        self._peers_expire_s = clock()

    def __call__(self) -> Sequence[Store]:
        """Looks for new nodes now and then; on the client's threads, never on the step's."""
        if self._clock() >= self._peers_expire_s:
            self._peers_expire_s = self._clock() + PEERS_S
            try:
                actors = other_cold_stores()
            except RayError as exc:
                logger.warning("cold stores of other nodes unknown error=%r", exc)
            else:
                self._peers = [RayStore(_known(actor)) for actor in actors]
        return [self._own, *self._peers]


def _known(actor: Any) -> Callable[[], Any]:
    return lambda: actor
