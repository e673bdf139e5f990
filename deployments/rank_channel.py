"""The short way between an engine's shell and its rank 0, on one machine: outputs one way,
sequences the other, over a unix socket of their own. A Ray call takes 1.5 ms of each process, and
of the rank's it takes them from the step loop.

Messages are pickles, length first: whoever may open the socket runs as the same user.
"""

import asyncio
import contextlib
import itertools
import pickle
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.async_engine import AsyncEngine
from engine.errors import EngineError, EngineStopped
from engine.outputs import StepOutput

LENGTH_BYTES = 4
OUTPUT_WAIT_S = 5.0


class ChannelEnd:
    """The rank's end: one shell, from `path` on; its threads end with the process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._folder = tempfile.mkdtemp(prefix="flashray-rank-")  # mode 0700
        self.path = str(Path(self._folder, "socket"))
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(1)
        self._sending = threading.Lock()
        threading.Thread(target=self._serve, name="channel", daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listening.accept()
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        with connection, contextlib.suppress(OSError):  # a shell that dies has ended its ranks
            outputs = threading.Thread(
                target=self._send_outputs, args=(connection,), name="outputs", daemon=True
            )
            outputs.start()
            self._receive(connection)

    def _send_outputs(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                try:
                    outputs = self._engine.next_outputs(OUTPUT_WAIT_S)
                except EngineError as error:
                    self._send(connection, error)
                    return
                if outputs:
                    self._send(connection, outputs)

    def _receive(self, connection: socket.socket) -> None:
        """Adding never waits for a step, and neither do others for it."""
        with connection.makefile("rb") as stream:
            while header := stream.read(LENGTH_BYTES):
                number, arguments, options = pickle.loads(stream.read(_length(header)))
                error: EngineError | None = None
                try:
                    self._engine.add(*arguments, **options)
                except EngineError as exc:
                    error = exc
                self._send(connection, (number, error))

    def _send(self, connection: socket.socket, message: Any) -> None:
        with self._sending:
            connection.sendall(_framed(message))


class Channel:
    """The shell's end, on one event loop. Every method raises EngineStopped once the rank has ended
    its own, with the rank's reason or what `end_reason` says."""

    def __init__(self, path: str, end_reason: Callable[[], str]) -> None:
        self._path = path
        self._end_reason = end_reason
        self._opening: asyncio.Task[asyncio.StreamWriter] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._added: dict[int, asyncio.Future[None]] = {}
        self._outputs: list[StepOutput] = []
        self._has_outputs = asyncio.Event()
        self._stopped: EngineStopped | None = None

    async def next_outputs(self) -> list[StepOutput]:
        """Every output not read yet; waits for the first."""
        await self._open()
        await self._has_outputs.wait()
        outputs, self._outputs = self._outputs, []
        if not outputs and self._stopped is not None:
            raise self._stopped
        if self._stopped is None:
            self._has_outputs.clear()
        return outputs

    async def add(self, *arguments: Any, **options: Any) -> None:
        """As AsyncEngine.add."""
        writer = await self._open()
        if self._stopped is not None:
            raise self._stopped
        number = next(self._numbers)
        added = self._added[number] = asyncio.get_running_loop().create_future()
        writer.write(_framed((number, arguments, options)))
        await added

    def close(self) -> None:
        """Whoever waits is told that the rank has ended. Idempotent."""
        self._stop(EngineStopped(self._end_reason()))
        if self._writer is not None:
            self._writer.close()

    async def _open(self) -> asyncio.StreamWriter:
        """Once, whoever comes first."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._connect())
        return await asyncio.shield(self._opening)

    async def _connect(self) -> asyncio.StreamWriter:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as exc:
            raise EngineStopped(self._end_reason()) from exc
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader))
        return writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header = await reader.readexactly(LENGTH_BYTES)
                self._take(pickle.loads(await reader.readexactly(_length(header))))
        except (OSError, asyncio.IncompleteReadError):
            self._stop(EngineStopped(self._end_reason()))

    def _take(self, message: Any) -> None:
        if isinstance(message, EngineError):
            self._stop(EngineStopped(str(message)))
        elif isinstance(message, list):
            self._outputs += message
            self._has_outputs.set()
        else:
            number, error = message
            added = self._added.pop(number)
            if not added.cancelled():
                added.set_result(None) if error is None else added.set_exception(error)

    def _stop(self, stopped: EngineStopped) -> None:
        self._stopped = self._stopped or stopped
        self._has_outputs.set()
        for added in self._added.values():
            if not added.done():
                added.set_exception(self._stopped)
        self._added.clear()


def _framed(message: Any) -> bytes:
    content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def _length(header: bytes) -> int:
    return int.from_bytes(header, "little")
