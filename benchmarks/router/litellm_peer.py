"""LiteLLM in its own environment: pinned by hash, without credentials, at its fastest: one master
key, which it insists on, no limits, no database."""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.child import child
from benchmarks.command import Progress
from benchmarks.errors import MeasurementFailed
from benchmarks.router.script import KEY, Dialect
from cluster.bringup import free_port
from deployments.model_files import default_cache_dir

REQUIREMENTS = Path(__file__).with_name("litellm-requirements.txt")
PEER = "litellm 1.108.7"
MODELS: dict[Dialect, str] = {"chat": "scripted-openai", "messages": "scripted-claude"}
INSTALL_TIMEOUT_S = 600
START_TIMEOUT_S = 120


def installed(progress: Progress) -> Path:
    """The environment's folder, made once for each content of the requirements. Raises
    MeasurementFailed."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = default_cache_dir() / "peers" / f"litellm-{digest}"
    done = folder / "installed"
    if not done.exists():
        progress(f"installing {PEER} into {folder} (once)")
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--require-hashes"]
        _run(*pip, "--requirement", str(REQUIREMENTS))
        done.touch()
    return folder


@contextmanager
def litellm(folder: Path, upstream_port: int, core: int) -> Iterator[int]:
    """The port of a proxy whose two models are the mock in its two dialects."""
    port = free_port()
    with tempfile.TemporaryDirectory() as home:
        config = Path(home) / "config.yaml"
        config.write_text(json.dumps(_config(upstream_port)))  # JSON is YAML
        command = [str(folder / "bin" / "litellm"), "--config", str(config)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        command += ["--telemetry", "False"]
        environment = {
            "HOME": home,
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "LITELLM_MASTER_KEY": KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "ERROR",
        }
        ready_url = f"http://127.0.0.1:{port}/health/liveliness"
        with child(
            command,
            ready_url,
            cores={core},
            environment=environment,
            timeout_s=START_TIMEOUT_S,
        ):
            yield port


def _config(upstream_port: int) -> dict[str, object]:
    upstream = f"http://127.0.0.1:{upstream_port}"
    return {
        "model_list": [
            {
                "model_name": MODELS["chat"],
                "litellm_params": {
                    "model": "openai/scripted",
                    "api_base": f"{upstream}/v1",
                    "api_key": "none",
                },
            },
            {
                "model_name": MODELS["messages"],
                "litellm_params": {
                    "model": "anthropic/scripted",
                    "api_base": upstream,
                    "api_key": "none",
                },
            },
        ],
    }


def _run(*command: str) -> None:
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise MeasurementFailed(f"`{' '.join(command)}` took over {exc.timeout:g} s") from exc
    if ran.returncode != 0:
        raise MeasurementFailed(f"`{' '.join(command)}` failed:\n{ran.stderr[-2000:]}")
