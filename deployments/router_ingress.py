"""The HTTP ingress on Ray Serve: builds the router with the real backend, and nothing else."""

import gc
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from deployments.backend_settings import upstreams_of
from deployments.config import AppConfig, team_names_by_key_hash, teams_of
from deployments.limit_store import limit_store_url
from deployments.listener import Listener
from deployments.local_backend import LocalBackend
from deployments.model_files import ModelFiles, default_state_dir, open_model
from deployments.shared_port import listening_socket
from deployments.team_status import TeamStatus
from router.app import create_app
from router.audit import JsonlSink
from router.backends.pool import BackendPool
from router.capabilities import Capability
from router.catalog import Catalog, ServedModel
from router.config import RouterConfig
from router.identity import KeyRing
from router.limits.failover import FailoverLimiter
from router.limits.ip_limit import IpLimit
from router.limits.limiter import Limiter, connect
from router.routes import RoutesError
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


LOCAL_CAPABILITIES = frozenset({Capability.STRUCTURED_OUTPUT})


def served_model(files: ModelFiles, config: AppConfig) -> ServedModel:
    manifest = files.manifest
    max_model_len = min(manifest.max_model_len, config.engine.max_model_len or (1 << 62))
    return ServedModel(
        id=config.served_name or manifest.name,
        display_name=config.served_name or manifest.name,
        created_at=datetime.fromtimestamp(files.path.stat().st_mtime, UTC),
        max_model_len=max_model_len,
        vocab_size=manifest.vocab_size,
        eos_token_ids=manifest.eos_token_ids,
        tokenizer=Tokenizer.from_folder(files.path),
        chat_template=(
            ChatTemplate.from_folder(files.path, manifest.special_tokens)
            if (files.path / "chat_template.jinja").exists()
            else None
        ),
        capabilities=LOCAL_CAPABILITIES,
    )


class RouterIngress:
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AppConfig, model_path: str, engine: Any, door: Path | None
    ) -> None:
        model = served_model(open_model(Path(model_path)), config)
        url = await limit_store_url(config.limits)
        limiter: FailoverLimiter | None = None
        ip_limit: IpLimit | None = None
        limits_of: TeamStatus | None = None
        teams = teams_of(config)
        if url is not None:
            redis = connect(url, config.limits.timeout_s)
            shared = Limiter(redis, lease_s=config.limits.lease_s)
            limiter = FailoverLimiter(shared, config.router.num_replicas)
            limits_of = TeamStatus({team.name: team for team in teams}, shared)
            ip_limit = IpLimit(redis, config.limits.requests_per_minute_per_address)
        catalog = Catalog([model], dict.fromkeys(config.aliases, model.id))
        self._pool = BackendPool(upstreams_of(config.backends), config.routes, catalog.names)
        self._app = create_app(
            catalog=catalog,
            pool=self._pool,
            backend=LocalBackend(engine, config.engine.lease_s),
            keys=KeyRing(team_names_by_key_hash(config)),
            teams=teams,
            sink=JsonlSink(config.audit.folder or default_state_dir() / "audit"),
            limiter=limiter,
            ip_limit=ip_limit,
            limits_of=limits_of,
            config=RouterConfig(
                max_body_bytes=config.router.max_body_mib << 20,
                keep_alive_s=config.router.keep_alive_s,
                max_running_requests=config.router.max_running_requests,
                trusted_proxies=config.router.trusted_proxies,
            ),
        )
        self._listener: Listener | None = None
        if door is not None:
            max_connections = config.router.max_ongoing_requests
            self._listener = Listener(self._app, listening_socket(str(door)), max_connections)
            self._listener.start()
        # What exists now stays: walking 152,000 start-up objects in a full collection stops every
        # stream of this replica for 80 to 110 ms (CPU host, 60 requests/s; p99 38 -> 28 ms).
        gc.collect()
        gc.freeze()

    async def __del__(self) -> None:
        """Serve awaits it when the replica ends in order."""
        if self._listener is not None:
            await self._listener.stop()

    def reconfigure(self, user_config: Any) -> None:
        """A new route table, `{"routes": [...]}`, for requests that begin from now on. An invalid
        one is logged and told in /v1/status, and the old one stays: raising would make Serve end
        this replica and every one that it starts in its place."""
        routes = user_config.get("routes") if isinstance(user_config, dict) else user_config
        try:
            self._pool.replace_routes(routes)
        except RoutesError as exc:
            logger.error("routes rejected, the old ones stay: %s", exc)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


def router_deployment(
    config: AppConfig, model_path: str, engine: serve.Application, door: Path | None = None
) -> serve.Application:
    deployment: serve.Deployment = serve.deployment(
        name="Router",
        num_replicas=config.router.num_replicas,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=config.router.max_ongoing_requests,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=5,
    )(serve.ingress()(RouterIngress))
    return deployment.bind(config, model_path, engine, door)
