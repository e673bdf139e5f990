"""A port that outlives those who take its connections."""

import asyncio
import socket
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from deployments.errors import BringUpError
from deployments.listener import Listener
from deployments.shared_port import listening_socket, shared_port

HOST = "127.0.0.1"


class App:
    """Answers with its name, once it may."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_asked = 0
        self.was_asked = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_asked += 1
        self.client = scope["client"]
        self.was_asked.set()
        await self.may_answer.wait()
        await PlainTextResponse(self.name)(scope, receive, send)


def listener(app: App, door: Path) -> Listener:
    return Listener(app, listening_socket(str(door)), max_connections=100)


async def ask(port: int, **headers: str) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=10, headers=headers) as client:
        return (await client.get(f"http://{HOST}:{port}/")).text


async def test_a_connection_waits_until_somebody_takes_it():
    with shared_port(HOST, 0) as port:
        waiting = asyncio.create_task(ask(port.port))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        first = listener(App("first"), port.door)
        first.start()
        assert await waiting == "first"
        await first.stop()
        waiting = asyncio.create_task(ask(port.port))
        second = listener(App("second"), port.door)
        second.start()
        assert await waiting == "second"
        await second.stop()


async def test_who_stops_finishes_what_it_has_begun():
    app = App("slow")
    app.may_answer.clear()
    with shared_port(HOST, 0) as port:
        serving = listener(app, port.door)
        serving.start()
        waiting = asyncio.create_task(ask(port.port))
        await app.was_asked.wait()
        stopping = asyncio.create_task(serving.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        app.may_answer.set()
        assert await waiting == "slow"
        await stopping


async def test_two_share_the_connections():
    apps = [App("one"), App("other")]
    with shared_port(HOST, 0) as port:
        listeners = [listener(app, port.door) for app in apps]
        for each in listeners:
            each.start()
        answers = await asyncio.gather(*(ask(port.port) for _ in range(20)))
        assert len(answers) == sum(app.num_asked for app in apps) == 20
        for each in listeners:
            await each.stop()


async def test_nobody_says_that_he_is_another():
    app = App("one")
    with shared_port(HOST, 0) as port:
        serving = listener(app, port.door)
        serving.start()
        await ask(port.port, **{"x-forwarded-for": "203.0.113.7"})
        assert app.client[0] == HOST
        await serving.stop()


def test_a_taken_port_is_said():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(BringUpError, match=f"cannot listen on {HOST}:{port}"),
            shared_port(HOST, port),
        ):
            pass


def test_the_door_is_for_its_owner_and_goes_with_the_port():
    with shared_port(HOST, 0) as port:
        assert port.door.parent.stat().st_mode & 0o077 == 0
        with listening_socket(str(port.door)) as listening:
            assert listening.getsockname() == (HOST, port.port)
    assert not port.door.exists()
    with pytest.raises(OSError, match="No such file"):
        listening_socket(str(port.door))
    with socket.create_server((HOST, port.port)):
        pass
