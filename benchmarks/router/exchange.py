"""One request over and over on kept-alive connections: an HTTP/1.1 client that costs little, so
that sender and upstream fit on one core at hundreds of requests a second."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.load import ExchangeFailed

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
MAX_IDLE_S = 2.0  # servers close after 5 s, and a request would cross that on its way


@dataclass(slots=True)
class Exchange:
    """Posts `body` to a loopback port and expects a 200 that holds `expected`."""

    port: int
    path: str
    body: bytes
    headers: Mapping[str, str]
    expected: bytes
    _idle: list[tuple[float, Connection]] = field(default_factory=list)

    async def send(self, _number: int) -> None:
        """Raises ExchangeFailed; a connection that failed or was cancelled is not used again."""
        reader, writer = self._kept_alive() or await self._connect()
        try:
            writer.write(self._request())
            status, content = await _answer(reader)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as exc:
            writer.close()
            raise ExchangeFailed(f"{self.path}: {exc!r}") from exc
        except BaseException:
            writer.close()
            raise
        self._idle.append((time.monotonic(), (reader, writer)))
        if status != 200 or self.expected not in content:
            raise ExchangeFailed(f"{self.path}: {status} {content[:300]!r}")

    async def close(self) -> None:
        while self._idle:
            _, (_, writer) = self._idle.pop()
            writer.close()

    def _kept_alive(self) -> Connection | None:
        """The one used last, unless even that has been idle for too long: then all have."""
        while self._idle:
            since_s, connection = self._idle.pop()
            if time.monotonic() - since_s <= MAX_IDLE_S:
                return connection
            connection[1].close()
        return None

    async def _connect(self) -> Connection:
        return await asyncio.open_connection("127.0.0.1", self.port)

    def _request(self) -> bytes:
        fields = {
            "host": f"127.0.0.1:{self.port}",
            "content-type": "application/json",
            "content-length": str(len(self.body)),
            **self.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode() + self.body


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body. Raises what the reader raises, and ValueError for what is not HTTP/1.1."""
    status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
    headers = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    status = int(status_line.split()[1])
    if headers.get("transfer-encoding") != "chunked":
        return status, await reader.readexactly(int(headers.get("content-length", "0")))
    content = b""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        content += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return status, content
