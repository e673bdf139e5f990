"""The whole app on this machine, as `flashray serve` runs it: model files, Ray, Serve, ready."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from cluster.bringup import LocalRay, RayOptions, require_free_port
from deployments.config import AppConfig
from deployments.errors import BringUpError
from deployments.model_files import ModelFiles, prepare_model
from deployments.shared_port import shared_port

Progress = Callable[[str], None]
READY_TIMEOUT_S = 300.0
BASE_OBJECT_STORE_BYTES = 256 << 20  # beside what the cold store may fill


@dataclass(frozen=True, slots=True)
class RunningApp:
    url: str
    model: str
    dashboard_url: str | None
    ray_token_file: str


@contextmanager
def local_app(
    config: AppConfig,
    progress: Progress,
    *,
    include_dashboard: bool = True,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
) -> Iterator[RunningApp]:
    """Up on entry, gone with all its processes on exit. `num_cpus` None is enough for `config`,
    `num_gpus` None lets Ray count them. Raises DeploymentError, ClusterError."""
    require_free_port(config.http.host, config.http.port)
    progress(f"model: {config.model}")
    model = prepare_model(config.model, with_weights=config.engine.has_weights, progress=progress)
    progress("starting Ray")
    options = RayOptions(
        num_cpus or _num_cpus(config),
        num_gpus,
        BASE_OBJECT_STORE_BYTES + config.engine.cold_tier_bytes,
        include_dashboard=include_dashboard,
    )
    with shared_port(config.http.host, config.http.port) as port, LocalRay(options) as ray:
        if ray.ignored_address:
            progress(f"warning: RAY_ADDRESS={ray.ignored_address} is ignored: this Ray is private")
        progress("starting the engine and the router")
        try:
            deploy(config, model, port.door)
            url = f"http://{config.http.host}:{port.port}"
            await_ready(url)
            yield RunningApp(
                url=url,
                model=config.served_name or model.manifest.name,
                dashboard_url=ray.dashboard_url,
                ray_token_file=str(ray.token_file),
            )
        finally:
            from deployments.cold_store import end_cold_stores
            from deployments.limit_store import end_limit_store

            end_limit_store()
            end_cold_stores()


def deploy(config: AppConfig, model: ModelFiles, door: Path | None = None) -> int:
    """Run the app on the Ray this process is connected to; its port. With a `door`, as of
    `build_app`, there is no proxy. Raises BringUpError."""
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation
    from ray.serve.schema import LoggingConfig

    from deployments.app import APP_NAME, build_app

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    options = HTTPOptions(host=config.http.host, port=config.http.port)
    location = None if door is None else ProxyLocation.Disabled
    serve.start(proxy_location=location, http_options=options, logging_config=quiet)
    try:
        serve.run(build_app(config, model, door), name=APP_NAME, logging_config=quiet)
    except (RuntimeError, TimeoutError) as exc:
        said = [each.message for each in serve.status().applications[APP_NAME].deployments.values()]
        reason = failure_in(said) or str(exc)
        raise BringUpError(f"the app did not come up: {reason}") from exc
    return config.http.port


def failure_in(messages: Iterable[str]) -> str | None:
    """What the first deployment that could not be built died of: Serve tells its traceback, which
    ends with the error."""
    for message in messages:
        if "Error" in message:
            return re.sub(r"^[\w.]+: ", "", message.strip().splitlines()[-1])
    return None


def await_ready(url: str) -> None:
    """Raises BringUpError after READY_TIMEOUT_S."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    reason = "no answer"
    while time.monotonic() < deadline_s:
        try:
            answer = httpx.get(f"{url}/readyz", timeout=10, trust_env=False)
        except httpx.HTTPError as exc:
            reason = repr(exc)
        else:
            if answer.status_code == 200:
                return
            reason = answer.text
        time.sleep(0.2)
    raise BringUpError(f"{url}/readyz was not 200 within {READY_TIMEOUT_S:.0f} s: {reason}")


def _num_cpus(config: AppConfig) -> int:
    """Logical CPUs: shells and routers take tenths, each rank one; never too few to place them."""
    num_ranks = config.engine.num_replicas * config.engine.tensor_parallel_size
    return max(3 + num_ranks, os.cpu_count() or 1)
