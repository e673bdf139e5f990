"""A model behind the real router in this process, without Ray: `FlashrayClient` in local mode."""

import asyncio
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from deployments.config import AppConfig
from deployments.engine_shell import EngineShell, ShellOptions
from deployments.flash_engine import engine_config
from deployments.grammars import ModelGrammars
from deployments.in_process_rank import InProcessRank
from deployments.model_files import prepare_model
from deployments.router_ingress import served_model
from engine.async_engine import AsyncEngine
from engine.build import build_engine
from router.app import create_app
from router.catalog import Catalog
from router.client import ServedModel
from router.config import RouterConfig
from router.identity import KeyRing, hash_key

START_TIMEOUT_S = 60.0
NO_LEASE_S = 1e9  # router and engine die together: nobody has to prove that the other lives


@contextmanager
def serve_model(model_path: Path) -> Iterator[ServedModel]:
    """The model of a GGUF file or a Hugging Face folder, on a free port of this machine, behind a
    key of its own. Raises DeploymentError, EngineError."""
    config = AppConfig(model=str(model_path))
    files = prepare_model(config.model, with_weights=config.engine.has_weights)
    engine = build_engine(
        engine_config(str(files.path), config.engine), grammars=ModelGrammars.of_model(files.path)
    )
    rank = InProcessRank(AsyncEngine(engine))
    shell = EngineShell(rank, ShellOptions(lease_s=NO_LEASE_S))
    key = f"sk-flashray-{secrets.token_urlsafe(24)}"
    app = create_app(
        catalog=Catalog([served_model(files, config)], {}),
        backend=shell,
        keys=KeyRing({hash_key(key): "local"}),
        config=RouterConfig(),
    )
    server = _Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(_serve(server, shell)), daemon=True)
    thread.start()
    try:
        yield ServedModel(f"http://127.0.0.1:{server.port.result(START_TIMEOUT_S)}", key)
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
        rank.engine.shutdown(START_TIMEOUT_S)


class _Server(uvicorn.Server):
    """`port` is known once it listens; cancelled when it never will."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.port: Future[int] = Future()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.port.set_result(self.servers[0].sockets[0].getsockname()[1])


async def _serve(server: _Server, shell: EngineShell) -> None:
    shell.start()
    try:
        await server.serve()
    finally:
        server.port.cancel()
        await shell.stop()
