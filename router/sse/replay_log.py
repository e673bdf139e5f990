"""The bytes of streams that no engine can repeat, kept for a while so that a reader that lost its
connection can have the rest."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from router.errors import NotFound

MAX_STREAM_BYTES = 256 * 1024
MAX_TOTAL_BYTES = 64 * 1024 * 1024
TTL_S = 300.0


@dataclass(slots=True)
class _Stream:
    """`first_byte` is the offset of the oldest byte that is still held."""

    owner: str
    touched_s: float
    chunks: deque[bytes] = field(default_factory=deque)
    first_byte: int = 0
    end_byte: int = 0
    is_complete: bool = False

    @property
    def num_held(self) -> int:
        return self.end_byte - self.first_byte

    def drop_oldest(self) -> None:
        self.first_byte += len(self.chunks.popleft())


@dataclass(frozen=True, slots=True)
class Replay:
    """Bytes from the offset asked for to `end_byte`. `is_complete`: nothing will follow them."""

    content: bytes
    end_byte: int
    is_complete: bool


class ReplayLog:
    """A ring of the last `max_stream_bytes` of each stream, for `ttl_s` after its last byte, and
    `max_total_bytes` of all: then the stream that was silent longest goes first."""

    def __init__(
        self,
        max_stream_bytes: int = MAX_STREAM_BYTES,
        max_total_bytes: int = MAX_TOTAL_BYTES,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_stream_bytes = max_stream_bytes
        self._max_total_bytes = max_total_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._streams: OrderedDict[str, _Stream] = OrderedDict()  # silent longest first
        self.num_bytes = 0

    def append(self, request_id: str, owner: str, chunk: bytes) -> None:
        """Call before the chunk is sent. `owner` is the team that may read it."""
        stream = self._touch(request_id, owner)
        stream.chunks.append(chunk)
        stream.end_byte += len(chunk)
        self.num_bytes += len(chunk)
        while stream.num_held > self._max_stream_bytes:
            self._shorten(stream)
        self._forget_expired()
        while self.num_bytes > self._max_total_bytes:
            self._drop(next(iter(self._streams)))

    def complete(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.is_complete = True

    def read(self, request_id: str, owner: str, after_byte: int = 0) -> Replay:
        """Raises NotFound for a stream that is unknown, expired, another team's, or that no longer
        holds, or does not yet hold, the byte asked for."""
        self._forget_expired()
        stream = self._streams.get(request_id)
        if stream is None or stream.owner != owner:
            raise NotFound(f"stream {request_id} is unknown or has expired")
        if not stream.first_byte <= after_byte <= stream.end_byte:
            raise NotFound(
                f"stream {request_id}: expected an offset from {stream.first_byte} to "
                f"{stream.end_byte}, got {after_byte}; send the request again"
            )
        content = b"".join(stream.chunks)[after_byte - stream.first_byte :]
        return Replay(content, stream.end_byte, stream.is_complete)

    def _touch(self, request_id: str, owner: str) -> _Stream:
        stream = self._streams.setdefault(request_id, _Stream(owner, 0.0))
        stream.touched_s = self._clock()
        self._streams.move_to_end(request_id)
        return stream

    def _shorten(self, stream: _Stream) -> None:
        num_held = stream.num_held
        stream.drop_oldest()
        self.num_bytes -= num_held - stream.num_held

    def _forget_expired(self) -> None:
        oldest_s = self._clock() - self._ttl_s
        while self._streams:
            request_id, stream = next(iter(self._streams.items()))
            if stream.touched_s > oldest_s:
                return
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        self.num_bytes -= self._streams.pop(request_id).num_held
