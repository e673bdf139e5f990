"""A new route table reaches every replica of a running app, and no stream notices."""

import concurrent.futures
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from cluster.bringup import free_port
from router.identity import hash_key
from tests.fakes.checkpoint import tiny_checkpoint
from tests.fakes.upstream import FakeUpstream, Script, content

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
KEY = "sk-routes-test"
NUM_STREAMS = 16
TO_UPSTREAM = {"model": "house", "targets": [{"backend": "gateway", "model": "claude-up"}]}
TO_LOCAL = {"model": "house", "targets": [{"backend": "local", "model": "tiny"}]}
INVALID = {"model": "house", "targets": [{"backend": "nowhere", "model": "claude-up"}]}


class DeclaredApp:
    """The app of one declaration, of which only the route table changes."""

    def __init__(self, process: subprocess.Popen, port: int, arguments: dict[str, Any]) -> None:
        self._process = process
        self._arguments = arguments
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"x-api-key": KEY, "anthropic-version": "2023-06-01"},
            timeout=60,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # each request finds a replica anew
        )

    def deploy(self, *routes: dict[str, Any]) -> None:
        application = {
            "name": "flashray",
            "route_prefix": "/",
            "import_path": "deployments.serve_entry:app",
            "args": self._arguments,
            "deployments": [{"name": "Router", "user_config": {"routes": list(routes)}}],
        }
        self._process.stdin.write(json.dumps({"applications": [application]}) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "deployed\n"

    def ask(self) -> httpx.Response:
        body = {"model": "house", "max_tokens": 3, "stream": True}
        messages = [{"role": "user", "content": "hi"}]
        return self.client.post("/v1/messages", json={**body, "messages": messages})

    def answers_from(self) -> set[str]:
        """The backends that a handful of requests meet."""
        return {self.ask().headers.get("x-flashray-backend", "none") for _ in range(8)}

    def targets(self) -> set[str]:
        """Where the route leads, as a handful of replicas say."""
        answers = [self.client.get("/v1/status").json() for _ in range(8)]
        return {target for answer in answers for target in answer["routes"][0]["targets"]}

    def rejections(self) -> list[str | None]:
        answers = [self.client.get("/v1/status").json() for _ in range(8)]
        return [answer.get("routes_rejected") for answer in answers]


def wait_until(condition, timeout_s: float) -> float:
    """Seconds until it held."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, "it did not come true in time"
        time.sleep(0.05)
    return time.monotonic() - started_s


def is_up(app: DeclaredApp) -> bool:
    try:
        return app.client.get("/readyz").status_code == 200 and app.ask().status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def upstream() -> FakeUpstream:
    return FakeUpstream()


@pytest.fixture(scope="module")
def app(upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeclaredApp]:
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    tiny_checkpoint(folder, torch.float32, max_position_embeddings=4096)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "FLASHRAY_CACHE": str(tmp_path_factory.mktemp("cache")),
        "FLASHRAY_STATE": str(tmp_path_factory.mktemp("state")),
    }
    port = free_port()
    with upstream.served() as url:
        team = {"name": "red", "key_hashes": [hash_key(KEY)], "backends": ["local", "gateway"]}
        arguments = {
            "model": str(folder),
            "teams": [team],
            "backends": [{"name": "gateway", "kind": "proxy", "url": url}],
            "engine": {"kv_cache_gib": 0.02, "max_num_batched_tokens": 128},
            "router": {"num_replicas": 2},
            "limits": {"store": "none"},
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.declared_app", str(port)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        app = DeclaredApp(process, port, arguments)
        try:
            app.deploy(TO_UPSTREAM)
            wait_until(lambda: is_up(app), timeout_s=180)
            yield app
        finally:
            app.client.close()
            process.stdin.close()
            process.wait(60)
            process.stdout.close()


def test_a_reload_drops_no_stream_and_is_live_within_two_seconds(app, upstream):
    text = content("anthropic_many")
    upstream.seen.clear()
    pieces = tuple(text[i : i + 300] for i in range(0, len(text), 300))
    upstream.default = Script(pieces, delay_s=8.0 / len(pieces))
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as threads:
        running = [threads.submit(app.ask) for _ in range(NUM_STREAMS)]
        wait_until(lambda: len(upstream.seen) >= NUM_STREAMS, 5)
        app.deploy(TO_LOCAL)
        wait_until(lambda: app.targets() == {"local:tiny"}, 2.0)
        assert app.answers_from() == {"local"}
        assert not any(each.done() for each in running)
        answers = [each.result() for each in running]
    assert [answer.status_code for answer in answers] == [200] * NUM_STREAMS
    assert {answer.content for answer in answers} == {text}
    assert {answer.headers["x-flashray-backend"] for answer in answers} == {"gateway"}
    upstream.default = Script((text,))


def test_an_invalid_table_is_refused_and_the_old_one_stays(app):
    app.deploy(TO_LOCAL)
    wait_until(lambda: app.answers_from() == {"local"}, 10)
    app.deploy(INVALID)
    wait_until(lambda: all(app.rejections()), 10)
    assert "expected one of gateway, local, got 'nowhere'" in app.rejections()[0]
    assert app.answers_from() == {"local"}
    app.deploy(TO_UPSTREAM)
    wait_until(lambda: app.answers_from() == {"gateway"}, 10)
    assert not any(app.rejections())
