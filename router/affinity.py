"""Which engine replica gets a request: the one that knows the longest part of its prompt, unless it
carries more than its share; else the less loaded of two.

Pure bookkeeping of one router process. It knows neither Ray nor how blocks are hashed.
"""

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from router.generation import GenerationRequest
from router.limits.policy import est_output_tokens

MAX_SKEW = 1.3  # the most a chosen replica may carry, as a multiple of the mean
MAX_AHEAD = 1.5  # requests; what a chosen replica may carry more than the least loaded in any case
MAX_PREFIXES = 8192  # of one replica; 64 KiB of 8 bytes each in a publication
PREFIX_BYTES = 8  # of a block's hash: two of 2**16 blocks collide once in 2**33 choices
MAX_UNREAD_S = 30.0  # a generation that nobody began to read by then does not count as load


def load_tokens(request: GenerationRequest) -> int:
    """What a generation weighs while it runs: the tokens whose KV it will hold, as estimated."""
    return len(request.prompt_token_ids) + est_output_tokens(request.sampling.max_tokens)


class RecentPrefixes:
    """The blocks that were used last, at most `capacity`: a replica's prefix cache seen from
    outside. Of two blocks of a chain the head stays longer, as in the cache itself."""

    def __init__(self, capacity: int = MAX_PREFIXES) -> None:
        self.capacity = capacity
        self._prefixes: dict[bytes, None] = {}  # least recently used first

    def __contains__(self, prefix: bytes) -> bool:
        return prefix in self._prefixes

    def use(self, chain: Sequence[bytes]) -> None:
        for prefix in reversed(chain[: self.capacity]):
            self._prefixes.pop(prefix, None)
            self._prefixes[prefix] = None
        while len(self._prefixes) > self.capacity:
            del self._prefixes[next(iter(self._prefixes))]

    def packed(self) -> bytes:
        """All of them, PREFIX_BYTES each."""
        return b"".join(self._prefixes)


def unpacked(packed: bytes) -> Iterator[bytes]:
    for start in range(0, len(packed), PREFIX_BYTES):
        yield packed[start : start + PREFIX_BYTES]


@dataclass(frozen=True, slots=True)
class Publication:
    """What a replica says of itself: the prefixes it used last, packed, and the load of all that
    runs there, whichever router sent it."""

    prefixes: bytes = b""
    tokens: int = 0


@dataclass(slots=True)
class _Replica:
    """`sent` and `sent_before` are what this router sent since the last publication and since the
    one before: a publication may have been written before the newest of it arrived."""

    publication: Publication = Publication()
    published: frozenset[bytes] = frozenset()
    sent: RecentPrefixes = field(default_factory=RecentPrefixes)
    sent_before: RecentPrefixes = field(default_factory=RecentPrefixes)
    own_tokens: int = 0
    foreign_tokens: int = 0  # running there for other routers, as of the last publication

    @property
    def tokens(self) -> int:
        return self.own_tokens + self.foreign_tokens

    def publish(self, publication: Publication) -> None:
        if publication == self.publication:
            return
        self.publication = publication
        self.published = frozenset(unpacked(publication.prefixes))
        self.sent_before, self.sent = self.sent, RecentPrefixes()
        self.foreign_tokens = max(0, publication.tokens - self.own_tokens)

    def num_known(self, chain: Sequence[bytes]) -> int:
        for number, prefix in enumerate(chain):
            if not (prefix in self.published or prefix in self.sent or prefix in self.sent_before):
                return number
        return len(chain)


@dataclass(frozen=True, slots=True)
class _Flight:
    request_id: str
    replica: str
    tokens: int
    placed_s: float


class ReplicaChoice:
    """`place` chooses; `opened` and `closed` tell when a generation is read and no longer read,
    `followed` that it is read until it has `ended`. Replicas are known by their Serve tags."""

    def __init__(
        self, seed: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._random = random.Random(seed)
        self._clock = clock
        self._replicas: dict[str, _Replica] = {}
        self._unread: dict[str, _Flight] = {}  # oldest first
        self._read: dict[str, _Flight] = {}  # by the id of the call that reads, or its own

    def loads(self) -> dict[str, int]:
        """Tokens in flight on each replica."""
        return {tag: replica.tokens for tag, replica in self._replicas.items()}

    def update(self, publications: dict[str, Publication]) -> None:
        """All replicas there are, each with its newest publication."""
        self._replicas = {tag: self._replicas.get(tag) or _Replica() for tag in publications}
        for tag, publication in publications.items():
            self._replicas[tag].publish(publication)

    def place(
        self, request_id: str, tags: Collection[str], chain: Sequence[bytes], tokens: int
    ) -> list[str]:
        """The replicas of `tags`, best first; the first one counts as chosen. A request that is
        placed again was refused, and goes to another one. `chain` is of the prompt's full blocks,
        PREFIX_BYTES each."""
        refused = self._unread.get(request_id) or self._read.get(request_id)
        self.ended(request_id)
        self._drop_never_read()
        known = [tag for tag in tags if tag in self._replicas]
        others = [tag for tag in known if refused is None or tag != refused.replica]
        ranked = self._ranked(others or known, chain, tokens)
        if ranked:
            replica = self._replicas[ranked[0]]
            replica.sent.use(chain)
            replica.own_tokens += tokens
            self._unread[request_id] = _Flight(request_id, ranked[0], tokens, self._clock())
        return ranked

    def opened(self, request_id: str, call_id: str) -> None:
        flight = self._unread.pop(request_id, None)
        if flight is not None:
            self._read[call_id] = flight

    def followed(self, request_id: str) -> None:
        self.opened(request_id, request_id)

    def closed(self, call_id: str) -> None:
        """Idempotent; calls that read nothing are none of its business."""
        self._land(self._read.pop(call_id, None))

    def ended(self, request_id: str) -> None:
        """Nobody will read it, or follow it any more. One that a call reads ends with the call."""
        self._land(self._unread.pop(request_id, None) or self._read.pop(request_id, None))

    def _ranked(self, tags: Sequence[str], chain: Sequence[bytes], tokens: int) -> list[str]:
        if not tags:
            return []
        loads = {tag: self._replicas[tag].tokens for tag in tags}
        fitting = within_share(loads, tokens)
        num_known = {tag: self._replicas[tag].num_known(chain) for tag in fitting}
        if any(num_known.values()):
            best = max(fitting, key=lambda tag: (num_known[tag], -loads[tag]))
        else:
            pair = self._random.sample(fitting, min(2, len(fitting)))
            best = min(pair, key=lambda tag: loads[tag])
        return [best, *sorted((tag for tag in tags if tag != best), key=lambda tag: loads[tag])]

    def _land(self, flight: _Flight | None) -> None:
        replica = None if flight is None else self._replicas.get(flight.replica)
        if flight is not None and replica is not None:
            replica.own_tokens -= flight.tokens

    def _drop_never_read(self) -> None:
        oldest_s = self._clock() - MAX_UNREAD_S
        for request_id, flight in list(self._unread.items()):
            if flight.placed_s > oldest_s:
                return
            self.ended(request_id)


def within_share(loads: dict[str, int], tokens: int) -> list[str]:
    """The replicas that may take `tokens` more: with them they carry at most MAX_SKEW of the mean.
    Where so few run that one request is more than that, they may be MAX_AHEAD: sending every second
    request away from its prefix costs more than it evens out. Never empty."""
    mean = (sum(loads.values()) + tokens) / len(loads)
    most = max(MAX_SKEW * mean, min(loads.values()) + (1 + MAX_AHEAD) * tokens)
    return [tag for tag, load in loads.items() if load + tokens <= most]
