"""The answer of an upstream that speaks the client's own dialect, byte for byte. Nothing is held
back but what comes before the first content, so that another backend may still answer instead."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import httpx

from router.backends.meter import UpstreamMeter
from router.backends.reader import EventReader, json_object
from router.backends.upstream import error_of
from router.errors import BackendError
from router.sse.codec import EventDecoder

MAX_HELD_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 64 * 1024 * 1024
TAIL_S = 1.0  # a server that does not hang up after its last event

_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")


async def forwarded_frames(
    response: httpx.Response, reader: EventReader, meter: UpstreamMeter
) -> AsyncGenerator[bytes, None]:
    """Whole events, in as few pieces as they came in. Between two pieces, a comment may be sent.

    Raises RouterError for a stream that fails: before its first piece, nothing of it was given
    away; after it, only an error event of the upstream's own ends it in order.
    """
    await require_stream(response)
    decoder, fold = EventDecoder(), reader.fold
    pending = bytearray()
    is_committed = False
    chunks = response.aiter_bytes()
    async for chunk in chunks:
        pending += chunk
        for event in decoder.decode(chunk):
            reader.read(event)
        meter.observe()
        if reader.error is not None:
            if not is_committed:
                raise reader.error
            break
        end = _end_of_events(pending)
        if end and (fold.has_content or end > MAX_HELD_BYTES):
            yield bytes(pending[:end])
            del pending[:end]
            is_committed = True
        if fold.is_finished:
            pending += await _tail(chunks)
            break
    else:
        if fold.reason is None:
            raise BackendError("the upstream ended its answer before its last event")
    if pending:
        yield bytes(pending)


async def forwarded_answer(
    response: httpx.Response, reader: EventReader, meter: UpstreamMeter
) -> bytes:
    """Raises RouterError for what is no answer of the dialect, also with status 200."""
    content = await whole_body(response)
    payload = json_object(content)
    error = error_of(payload)
    if error is not None:
        raise error
    reader.fold.read_whole(payload)
    meter.observe()
    return content


async def whole_body(response: httpx.Response) -> bytes:
    """Raises BackendError for one that never ends."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise BackendError(f"the upstream's answer is larger than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


async def require_stream(response: httpx.Response) -> None:
    """Raises what an answer in one piece says went wrong, or BackendError."""
    content_type = response.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() == "text/event-stream":
        return
    error = None
    if "json" in content_type:
        error = error_of(json_object(await whole_body(response)))
    raise error or BackendError(f"expected a stream, got {content_type[:80]!r}")


def _end_of_events(pending: bytearray) -> int:
    """Behind the last event that is whole; 0 when none is."""
    return max(pending.rfind(end) + len(end) if end in pending else 0 for end in _EVENT_ENDS)


async def _tail(chunks: AsyncIterator[bytes]) -> bytes:
    """What follows the last event: usually nothing."""
    tail = bytearray()
    with contextlib.suppress(TimeoutError, httpx.TransportError):
        async with asyncio.timeout(TAIL_S):
            async for chunk in chunks:
                tail += chunk
    return bytes(tail)
