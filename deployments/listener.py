"""A router replica takes its connections itself: tokens take no detour through Serve's proxy, whose
hop costs 0.3 ms a token event."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 90  # longer than clients keep idle connections: they close first
DRAIN_S = 4


class Listener:
    """Serves `app` on the event loop that it is started in. The app's lifespan is somebody else's,
    and so is the socket, which others may take connections from."""

    def __init__(self, app: ASGIApp, listening: socket.socket, max_connections: int) -> None:
        self._socket = listening
        self._server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                access_log=False,
                proxy_headers=False,  # whose X-Forwarded-For is believed, the router decides
                log_config=None,
                limit_concurrency=max_connections,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def stop(self) -> None:
        """Takes no more connections, and returns once the requests have ended, or DRAIN_S later."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are for the process's owner."""
        yield
