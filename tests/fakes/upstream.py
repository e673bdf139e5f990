"""A scripted upstream: answers each request with the next script, byte for byte and fault by fault,
and keeps what it was sent. In process as an httpx transport, or as a server on a loopback port."""

import asyncio
import contextlib
import ssl
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

FIXTURES = Path(__file__).parents[1] / "fixtures" / "upstream"
SSE = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}
KEY = "sk-canary-upstream-key"


@dataclass(frozen=True)
class Script:
    """`chunks` are sent one by one, `delay_s` before each. `ends`: "clean", "cut" (the connection
    dies), "stall" (silence that nobody ends), "refuse" (no connection at all)."""

    chunks: tuple[bytes, ...] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: dict(SSE))
    ends: str = "clean"
    delay_s: float = 0.0


@dataclass(frozen=True)
class Seen:
    path: str
    headers: dict[str, str]
    content: bytes


@dataclass
class FakeUpstream:
    """Scripts are used up in order; then `default` answers."""

    scripts: deque[Script] = field(default_factory=deque)
    default: Script = field(default_factory=lambda: stream("anthropic_text"))
    seen: list[Seen] = field(default_factory=list)
    num_abandoned: int = 0

    def script(self, *scripts: Script) -> None:
        self.scripts.extend(scripts)

    def answer(self, seen: Seen) -> Script:
        self.seen.append(seen)
        return self.scripts.popleft() if self.scripts else self.default

    def transport(self) -> httpx.AsyncBaseTransport:
        return _Transport(self)

    @contextlib.contextmanager
    def served(self, tls: ssl.SSLContext | None = None) -> Iterator[str]:
        """The base URL of a server in a thread of its own."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            starting = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
            server = asyncio.run_coroutine_threadsafe(starting, loop).result(10)
            scheme = "http" if tls is None else "https"
            yield f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            asyncio.run_coroutine_threadsafe(_stop(server), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.closing(writer),
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError),
        ):
            seen = await _read_request(reader)
            gone = asyncio.ensure_future(reader.read())
            writing = asyncio.ensure_future(_write(writer, self.answer(seen)))
            await asyncio.wait({gone, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                self.num_abandoned += 1
            for task in (gone, writing):
                task.cancel()
            await asyncio.gather(gone, writing, return_exceptions=True)


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, upstream: FakeUpstream) -> None:
        self._upstream = upstream

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        content = await request.aread()
        path = request.url.raw_path.decode()
        script = self._upstream.answer(Seen(path, dict(request.headers), content))
        if script.ends == "refuse":
            raise httpx.ConnectError("connection refused")
        return httpx.Response(
            script.status, headers=script.headers, stream=_Body(script, self._upstream)
        )


class _Body(httpx.AsyncByteStream):
    def __init__(self, script: Script, upstream: FakeUpstream) -> None:
        self._script = script
        self._upstream = upstream
        self._is_over = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._script.chunks:
            await asyncio.sleep(self._script.delay_s)
            yield chunk
        self._is_over = self._script.ends != "stall"
        if self._script.ends == "cut":
            raise httpx.RemoteProtocolError("peer closed connection")
        if self._script.ends == "stall":
            await asyncio.sleep(0.05)
            raise httpx.ReadTimeout("silence")

    async def aclose(self) -> None:
        self._upstream.num_abandoned += not self._is_over


def content(name: str) -> bytes:
    """A transcript by its file name, or by its stem when that is a stream."""
    file = FIXTURES / name
    return (file if file.suffix else file.with_suffix(".sse")).read_bytes()


def stream(name: str, **changes: object) -> Script:
    return Script(chunks=(content(name),), **changes)  # type: ignore[arg-type]


def whole(name: str) -> Script:
    return Script(chunks=(content(name),), headers=dict(JSON))


def refusal(status: int, body: bytes = b"{}", **headers: str) -> Script:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Script((body,), status, {**JSON, **named})


async def _read_request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(head[0].split(" ")[1], headers, body)


async def _write(writer: asyncio.StreamWriter, script: Script) -> None:
    if script.ends == "refuse":
        return
    headers = {**script.headers, "transfer-encoding": "chunked", "connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"HTTP/1.1 {script.status} Scripted\r\n{lines}\r\n".encode())
    for chunk in script.chunks:
        await writer.drain()
        await asyncio.sleep(script.delay_s)
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
    await writer.drain()
    if script.ends == "stall":
        await asyncio.sleep(3600)
    if script.ends == "clean":
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _stop(server: asyncio.Server) -> None:
    server.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0.05)  # closed transports let go of their sockets in later turns
