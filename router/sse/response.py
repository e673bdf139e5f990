"""An ASGI answer of server-sent events that notices a client that left, keeps the connection
alive, and holds back its HTTP status until there is something to say."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from router.errors import BackendError, RouterError
from router.sse.codec import KEEP_ALIVE

logger = logging.getLogger(__name__)

T = TypeVar("T")
EncodeError = Callable[[RouterError], bytes]

# No proxy on the way may buffer, transform or cache a stream.
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
    "connection": "keep-alive",
}


class EventStream:
    """Sends `frames` as they come.

    An error before the first frame, within `keep_alive_s`, is raised, so that it is answered with
    its own HTTP status; later ones are appended to the stream by `encode_error`. A client that
    leaves closes `frames` at once.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        keep_alive_s: float,
        encode_error: EncodeError,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._frames = frames
        self._keep_alive_s = keep_alive_s
        self._encode_error = encode_error
        self._headers = {**STREAM_HEADERS, **(headers or {})}
        self._committed = False
        self._sent_s = 0.0
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnected(receive, self._stream(send))

    async def _stream(self, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._frames) as frames:
                await self._send_all(frames, send)
        except RouterError as error:
            await self._fail(error, send)
        except Exception:
            logger.exception("stream broke")
            await self._fail(BackendError("internal error: the stream broke"), send)

    async def _send_all(self, frames: AsyncGenerator[bytes, None], send: Send) -> None:
        self._sent_s = time.monotonic()
        keeping = asyncio.create_task(self._keep_alive(send))
        try:
            async for frame in frames:
                await self._send(send, frame)
            await self._send(send, b"", more=False)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        """Where nothing else has been sent for so long."""
        while True:
            silence_s = time.monotonic() - self._sent_s
            if silence_s < self._keep_alive_s:
                await asyncio.sleep(self._keep_alive_s - silence_s)
            elif self._sending.locked():  # to a client that does not read
                await asyncio.sleep(self._keep_alive_s)
            else:
                await self._send(send, KEEP_ALIVE)

    async def _fail(self, error: RouterError, send: Send) -> None:
        if not self._committed:
            raise error
        await self._send(send, self._encode_error(error), more=False)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        async with self._sending:
            if not self._committed:
                self._committed = True
                headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self._sent_s = time.monotonic()


async def until_disconnected(receive: Receive, work: Awaitable[T]) -> T | None:
    """Run `work`; cancel it, and return None, when the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
