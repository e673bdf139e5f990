"""Our router on Ray Serve, over the script in its own process or in a deployment of its own: what
the two hops of Serve cost."""

import argparse
import signal
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from benchmarks.router.our_router import LIMITS, MAX_MODEL_LEN, answer_token_ids, router_app
from benchmarks.router.script import KEY, MODEL
from benchmarks.router.scripted_backend import ScriptedEngine
from cluster.bringup import LocalRay, RayOptions
from deployments.config import AppConfig, AuditSettings, EngineSettings, HttpSettings, LimitSettings
from deployments.limit_store import end_limit_store, limit_store_url
from deployments.model_files import BUILT_IN_MODEL, ModelFiles, open_model, prepare_model
from deployments.router_ingress import router_deployment
from router.identity import hash_key


class ScriptedIngress:
    """The router and the script in one replica."""

    async def __init__(self, model_path: str, audit_folder: str) -> None:  # type: ignore[misc]  # Serve awaits it
        store_url = await limit_store_url(LimitSettings())
        assert store_url is not None
        self._app = router_app(open_model(Path(model_path)), store_url, Path(audit_folder))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


def application(backend: str, files: ModelFiles, audit_folder: Path) -> Any:
    """`scripted`: in the router's replica; `deployment`: behind a handle, like the engine."""
    if backend == "scripted":
        ingress = serve.deployment(
            name="Router", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=1000
        )(serve.ingress()(ScriptedIngress))
        return ingress.bind(str(files.path), str(audit_folder))
    engine = serve.deployment(
        name="Engine", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=1000
    )(ScriptedEngine).bind(answer_token_ids(files))
    return router_deployment(_config(audit_folder), str(files.path), engine)


def _config(audit_folder: Path) -> AppConfig:
    limits = {
        "requests_per_minute": LIMITS.requests_per_minute,
        "tokens_per_minute": LIMITS.tokens_per_minute,
        "max_concurrent_requests": LIMITS.max_concurrent_requests,
    }
    team = {"name": "benchmark", "key_hashes": [hash_key(KEY)], "limits": limits}
    return AppConfig(
        served_name=MODEL,
        teams=(team,),
        engine=EngineSettings(max_model_len=MAX_MODEL_LEN),
        audit=AuditSettings(folder=audit_folder),
    )


def _serve(port: int, backend: str, audit_folder: Path) -> None:
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    http = HttpSettings(port=port)
    serve.start(http_options={"host": http.host, "port": http.port}, logging_config=quiet)
    app = application(backend, prepare_model(BUILT_IN_MODEL), audit_folder)
    serve.run(app, logging_config=quiet)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--backend", choices=["scripted", "deployment"], required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    with (
        tempfile.TemporaryDirectory() as audit_folder,
        LocalRay(RayOptions(num_cpus=4, include_dashboard=False)),
    ):
        try:
            _serve(arguments.port, arguments.backend, Path(audit_folder))
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            end_limit_store()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
