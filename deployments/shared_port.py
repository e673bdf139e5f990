"""The port of an app on one machine, held by the process that outlives its router replicas: they
take connections from it, and while none of them is up, connections wait."""

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deployments.errors import BringUpError

BACKLOG = 2048
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SharedPort:
    """`door` is a unix socket that only this user may open: whoever connects gets the listening
    socket (`listening_socket`)."""

    port: int
    door: Path


@contextmanager
def shared_port(host: str, port: int) -> Iterator[SharedPort]:
    """Listens from entry to exit; port 0 takes any that is free. Raises BringUpError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise BringUpError(f"cannot listen on {host}:{port}: {exc}") from exc
    with (
        listening,
        tempfile.TemporaryDirectory(prefix="flashray-port-") as folder,
        socket.socket(socket.AF_UNIX) as door,
    ):
        path = Path(folder, "door")
        door.bind(str(path))
        door.listen()
        answering = threading.Thread(target=_answer, args=(door, listening), daemon=True)
        answering.start()
        try:
            yield SharedPort(listening.getsockname()[1], path)
        finally:
            door.shutdown(socket.SHUT_RDWR)
            answering.join(TIMEOUT_S)


def listening_socket(door: str) -> socket.socket:
    """The socket behind the `door`, in another process. Raises OSError when nobody holds it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(door)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    return socket.socket(fileno=descriptors[0])


def _answer(door: socket.socket, listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = door.accept()
        except OSError:  # shut down
            return
        with connection, contextlib.suppress(OSError):
            socket.send_fds(connection, [b"\0"], [listening.fileno()])
