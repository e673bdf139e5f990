"""`python -m benchmarks.serving`: results/serving-cpu.json, in about five minutes: the engine in
process beside its peer, then the whole app over HTTP."""

import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

import httpx

from benchmarks.command import Progress, run_benchmark
from benchmarks.engine.throughput import GATE, throughput
from benchmarks.errors import MeasurementFailed
from benchmarks.results import Row
from benchmarks.serving.workload import Streams
from cluster.bringup import free_port
from cluster.errors import ClusterError
from deployments.config import AppConfig, AuditSettings, HttpSettings
from deployments.errors import DeploymentError
from deployments.keys import DemoKey, with_key
from deployments.local_cluster import local_app

PACKAGES = ("httpx", "ray", "starlette", "tokenizers", "torch", "transformers", "uvicorn")
OPEN_RATE_PER_S, OPEN_WINDOW_S = 1.0, 40.0


def measure(progress: Progress) -> list[Row]:
    return throughput(progress) + over_http(progress)


def over_http(progress: Progress) -> list[Row]:
    """Raises MeasurementFailed when the app does not come up."""
    key = DemoKey(secrets.token_urlsafe(24), was_given=False)
    with tempfile.TemporaryDirectory() as audit_folder:
        config = AppConfig(
            audit=AuditSettings(folder=Path(audit_folder)), http=HttpSettings(port=free_port())
        )
        try:
            with local_app(with_key(config, key), progress, include_dashboard=False) as app:
                return asyncio.run(_loads(app.url, app.model, key.key, progress))
        except (DeploymentError, ClusterError) as exc:
            raise MeasurementFailed(f"the app did not come up: {exc}") from exc


async def _loads(url: str, model: str, key: str, progress: Progress) -> list[Row]:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=60, trust_env=False
    ) as client:
        rows: list[Row] = []

        def streams(name: str, seed: int) -> Streams:
            progress(f"load {name}")
            return Streams(name, client, model, seed)

        await streams("warm_up", 0).closed(concurrency=2, num_requests=4)
        rows += await streams("c1", 1).closed(concurrency=1, num_requests=10)
        rows += await streams("c8", 2).closed(concurrency=8, num_requests=40)
        rows += await streams("open", 3).open(OPEN_RATE_PER_S, OPEN_WINDOW_S)
        return rows


if __name__ == "__main__":
    sys.exit(run_benchmark("serving-cpu", GATE, measure, PACKAGES, "benchmarks.serving"))
