"""The servers: how a user starts each of them, with the same model, KV bytes and context."""

import json
import os
import secrets
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.child import child
from benchmarks.engine.job import VLLM_ENVIRONMENT
from benchmarks.http.rounds import Endpoint
from benchmarks.results import ROOT
from cluster.bringup import LOOPBACK, free_port
from router.identity import hash_key

Name = Literal["flashray", "vllm"]

MODEL = "benchmark"
START_TIMEOUT_S = 240.0
# Wide enough to refuse nothing, and counted like any others.
TEAM_LIMITS = {
    "requests_per_minute": 10**6,
    "tokens_per_minute": 10**9,
    "max_concurrent_requests": 1024,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What both servers are told; `router_replicas` ours alone."""

    model: Path
    device: str
    max_model_len: int
    kv_cache_gib: float
    router_replicas: int = 1


@contextmanager
def server(name: Name, setting: Setting, folder: Path) -> Iterator[Endpoint]:
    """Up and ready on entry, gone on exit. Raises MeasurementFailed."""
    start = _flashray if name == "flashray" else _vllm
    with start(setting, folder) as endpoint:
        yield endpoint


@contextmanager
def _flashray(setting: Setting, folder: Path) -> Iterator[Endpoint]:
    """As shipped: keys, limits and audit on."""
    key, port = secrets.token_urlsafe(24), free_port()
    settings_file = folder / "flashray.json"  # JSON is YAML
    settings_file.write_text(json.dumps(flashray_settings(setting, key), indent=2))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "FLASHRAY_STATE": str(folder / "state"),
    }
    command = [sys.executable, "-m", "deployments.cli", "serve", "--no-dashboard"]
    command += ["--config", str(settings_file), "--port", str(port)]
    url = f"http://{LOOPBACK}:{port}"
    ready_url = f"{url}/readyz"
    with child(command, ready_url, environment=environment, timeout_s=START_TIMEOUT_S):
        yield Endpoint(url, key, MODEL)


def flashray_settings(setting: Setting, key: str) -> dict[str, object]:
    return {
        "model": str(setting.model),
        "served_name": MODEL,
        "router": {"num_replicas": setting.router_replicas},
        "teams": [{"name": "benchmark", "key_hashes": [hash_key(key)], "limits": TEAM_LIMITS}],
        "engine": {
            "device": setting.device,
            "load_format": "dummy",
            "max_model_len": setting.max_model_len,
            "kv_cache_gib": setting.kv_cache_gib,
        },
    }


@contextmanager
def _vllm(setting: Setting, folder: Path) -> Iterator[Endpoint]:
    """What `vllm serve` runs."""
    port = free_port()
    environment = {**os.environ, **VLLM_ENVIRONMENT}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [*vllm_arguments(setting), "--host", LOOPBACK, "--port", str(port)]
    url = f"http://{LOOPBACK}:{port}"
    with child(command, f"{url}/health", environment=environment, timeout_s=START_TIMEOUT_S):
        yield Endpoint(url, "none", MODEL)


def vllm_arguments(setting: Setting) -> list[str]:
    options = {
        "model": setting.model,
        "served-model-name": MODEL,
        "load-format": "dummy",
        "dtype": "bfloat16",
        "max-model-len": setting.max_model_len,
        "kv-cache-memory-bytes": int(setting.kv_cache_gib * (1 << 30)),
        "seed": 0,
    }
    pairs = [(f"--{name}", str(value)) for name, value in options.items()]
    return [*(each for pair in pairs for each in pair), "--enable-prefix-caching"]


def peer_version(endpoint: Endpoint) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{endpoint.url}/version", timeout=10) as answer:
        return f"vllm {json.load(answer)['version']}"
