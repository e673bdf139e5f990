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
from deployments.engine_shell import EngineShell, RankStatus, ShellOptions
from deployments.flash_engine import engine_config
from deployments.model_files import prepare_model
from deployments.router_ingress import served_model
from engine.async_engine import AsyncEngine
from engine.build import build_engine
from engine.outputs import StepOutput, Usage
from engine.sampling_params import SamplingParams
from router.app import create_app
from router.catalog import Catalog
from router.client import ServedModel
from router.config import RouterConfig
from router.identity import KeyRing, hash_key

OUTPUT_WAIT_S = 0.5
START_TIMEOUT_S = 60.0
NO_LEASE_S = 1e9  # router and engine die together: nobody has to prove that the other lives


@contextmanager
def serve_model(model_path: Path) -> Iterator[ServedModel]:
    """The model of a GGUF file or a Hugging Face folder, on a free port of this machine, behind a
    key of its own. Raises DeploymentError, EngineError."""
    config = AppConfig(model=str(model_path))
    files = prepare_model(config.model)
    rank = InProcessRank(AsyncEngine(build_engine(engine_config(str(files.path), config.engine))))
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


class InProcessRank:
    """The rank that an EngineShell reads, in threads of this process."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def add(
        self,
        seq_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        cache_salt: bytes,
        priority: int,
    ) -> None:
        self.engine.add(seq_id, prompt_token_ids, params, cache_salt=cache_salt, priority=priority)

    async def abort(self, seq_id: str) -> Usage | None:
        return await asyncio.to_thread(self.engine.abort, seq_id)

    async def next_outputs(self) -> list[StepOutput]:
        return await asyncio.to_thread(self.engine.next_outputs, OUTPUT_WAIT_S)

    async def status(self) -> RankStatus:
        stats, totals = self.engine.stats, self.engine.totals
        return RankStatus(
            stalled_s=self.engine.last_progress_s,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_free_blocks=stats.num_free_blocks,
            num_blocks=stats.num_blocks,
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            completion_tokens_total=totals.completion_tokens,
            preemptions_total=totals.preemptions,
        )
