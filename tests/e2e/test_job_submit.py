"""`ray job submit` against a real head: the job ends, the app stays."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster.bringup import free_port
from router.identity import hash_key
from tests.unit.deployments.test_model_files import tiny_checkpoint

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
KEY = "key-of-the-job-test"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Head:
    process: subprocess.Popen[bytes]
    dashboard_url: str
    environment: dict[str, str]


def await_true(condition: Callable[[], bool], what: str, timeout_s: float = 40.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.1)


def answers(url: str) -> bool:
    """Whether something listens; a 401 is an answer."""
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code < 500
    except httpx.HTTPError:
        return False


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a head and all it started, by pid."""
    parent = psutil.Process(process.pid)
    tree = [*parent.children(recursive=True), parent]
    parent.terminate()
    _, alive = psutil.wait_procs(tree, timeout=3)
    for survivor in alive:
        survivor.kill()
    process.wait()
    psutil.wait_procs(alive, timeout=10)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    folder = tmp_path_factory.mktemp("head")
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    gcs, dashboard = free_port(), free_port()
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment = inherited | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLASHRAY_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # a router replica would drain for 30 s
        "PATH": f"{RAY.parent}{os.pathsep}{os.environ['PATH']}",  # an activated environment
    }
    options = f"""--head --block --port {gcs} --dashboard-host 127.0.0.1
        --dashboard-port {dashboard} --num-cpus 4 --object-store-memory 100000000
        --dashboard-agent-listen-port {free_port()} --ray-client-server-port {free_port()}"""
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(
            [RAY, "start", *options.split()],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        url = f"http://127.0.0.1:{dashboard}"
        await_true(lambda: answers(url), f"the dashboard at {url}")
        yield Head(process, url, environment)
    finally:
        end_tree(process)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app")
    checkpoint = tiny_checkpoint(folder / "tiny")
    (checkpoint / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    file = folder / "app.yaml"
    content = {
        "model": str(checkpoint),
        "key_hashes": {hash_key(KEY): "red"},
        "engine": {"kv_cache_gib": 0.01, "max_num_batched_tokens": 64},
        "http": {"port": free_port()},
    }
    file.write_text(yaml.safe_dump(content))
    return file


def submit(head: Head, config_file: Path) -> subprocess.CompletedProcess[str]:
    """The command of the README, word for word but for the address and the file."""
    return run_job(head, "serve", "--config", str(config_file))


def run_job(head: Head, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = f"job submit --working-dir . -- python -m deployments.jobs.{name}"
    return subprocess.run(
        [RAY, *command.split(), *arguments],
        env=head.environment | {"RAY_ADDRESS": head.dashboard_url},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def process_names(head: Head) -> list[str]:
    names = []
    for process in psutil.Process(head.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            names.append(" ".join([process.name(), *process.cmdline()]))
    return names


def url_of(config_file: Path) -> str:
    return f"http://127.0.0.1:{yaml.safe_load(config_file.read_text())['http']['port']}"


def ask(url: str, key: str) -> httpx.Response:
    body = {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "hello"}],
    }
    headers = {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    return httpx.post(f"{url}/v1/messages", json=body, headers=headers, timeout=30, trust_env=False)


def test_job_ends_and_its_app_answers_also_after_a_second_job(
    head: Head, config_file: Path
) -> None:
    url = url_of(config_file)
    for _ in range(2):
        job = submit(head, config_file)
        assert job.returncode == 0, job.stdout + job.stderr
        assert "succeeded" in job.stdout
        assert f"Flashray serves tiny at {url}" in job.stdout
        assert httpx.get(f"{url}/readyz", timeout=10, trust_env=False).status_code == 200
        answer = ask(url, KEY)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["output_tokens"] >= 1
        assert ask(url, "another").status_code == 401


def test_job_says_where_serve_listens_when_it_cannot_move(
    head: Head, config_file: Path, tmp_path: Path
) -> None:
    content = yaml.safe_load(config_file.read_text())
    running, content["http"]["port"] = content["http"]["port"], free_port()
    moved = tmp_path / "moved.yaml"
    moved.write_text(yaml.safe_dump(content))
    job = submit(head, moved)
    assert job.returncode == 1
    assert f"Serve listens on 127.0.0.1:{running} already" in job.stdout


def test_drain_ends_the_app_and_its_stores(head: Head, config_file: Path) -> None:
    stores = [name for name in process_names(head) if "LimitStore" in name]
    assert stores
    for _ in range(2):
        job = run_job(head, "drain")
        assert job.returncode == 0, job.stdout + job.stderr
        assert "drained" in job.stdout
    answer = httpx.get(f"{url_of(config_file)}/readyz", timeout=10, trust_env=False)
    assert answer.status_code in (404, 503)
    assert not [name for name in process_names(head) if "LimitStore" in name or "valkey" in name]
