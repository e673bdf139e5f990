"""Who stands between the sender and the script, on which cores, and how they are asked."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from benchmarks.child import child
from benchmarks.command import Progress
from benchmarks.router.exchange import Exchange
from benchmarks.router.litellm_peer import MODELS, installed, litellm
from benchmarks.router.script import HEADERS, MODEL, PATHS, Dialect, request_body
from cluster.bringup import RAY_ENVIRONMENT, free_port

GATEWAY_CORE, SENDER_CORE = 0, 1
EXPECTED = b"lazy dog"


@dataclass(frozen=True, slots=True)
class Gateway:
    name: str
    port: int
    models: dict[Dialect, str] = field(default_factory=lambda: {"chat": MODEL, "messages": MODEL})

    def exchange(self, dialect: Dialect, num_bytes: int) -> Exchange:
        body = request_body(dialect, self.models[dialect], num_bytes)
        return Exchange(self.port, PATHS[dialect], body, HEADERS[dialect], EXPECTED)


@dataclass(frozen=True, slots=True)
class Gateways:
    """`mock` is LiteLLM's upstream, asked directly."""

    ours: Gateway
    peer: Gateway
    mock: Gateway


@contextmanager
def running_gateways(progress: Progress) -> Iterator[Gateways]:
    """All three up: the gateways on one core, the mock on the sender's."""
    folder = installed(progress)
    with ExitStack() as stack:
        mock_port, our_port = free_port(), free_port()
        stack.enter_context(_module("benchmarks.router.mock_upstream", mock_port, {SENDER_CORE}))
        progress("starting our router")
        stack.enter_context(_module("benchmarks.router.our_router", our_port, {GATEWAY_CORE}))
        progress("starting LiteLLM")
        peer_port = stack.enter_context(litellm(folder, mock_port, GATEWAY_CORE))
        yield Gateways(
            Gateway("ours", our_port),
            Gateway("litellm", peer_port, MODELS),
            Gateway("mock", mock_port),
        )


@contextmanager
def serve_app(backend: str) -> Iterator[Gateway]:
    """Our router behind Serve's proxy, on any core; `backend`: `scripted` or `deployment`."""
    port = free_port()
    with _module("benchmarks.router.serve_app", port, None, "--backend", backend):
        yield Gateway(f"serve, {backend}", port)


@contextmanager
def _module(name: str, port: int, cores: set[int] | None, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", name, "--port", str(port), *arguments]
    environment = {**os.environ, **RAY_ENVIRONMENT}  # Ray reads it when it is imported
    ready_url = f"http://127.0.0.1:{port}/healthz"
    with child(command, ready_url, cores=cores, environment=environment):
        yield
