"""The ASGI app: what is built from what, which route goes where, how errors are answered."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from router.accounting import Accounting
from router.audit import AuditSink, LogSink
from router.backends.base import Backend
from router.backends.dispatch import Dispatcher
from router.backends.pool import BackendPool
from router.catalog import Catalog
from router.config import RouterConfig
from router.console_routes import CONSOLE_ROUTES
from router.dialect import error_response
from router.endpoints import Endpoints
from router.errors import MethodNotAllowed, NotFound, RouterError, UpstreamRefusal
from router.guard import Guard
from router.identity import KeyRing
from router.limits.fair_queue import FairQueue
from router.limits.ip_limit import IpLimit
from router.limits.limiter import TeamLimiter
from router.metrics import RouterMetrics
from router.openapi import serve_openapi
from router.pipeline import Pipeline
from router.status import LimitsOf, StatusEndpoint
from router.teams import Team


def create_app(
    *,
    catalog: Catalog,
    backend: Backend,
    keys: KeyRing,
    config: RouterConfig,
    teams: Sequence[Team] = (),
    sink: AuditSink | None = None,
    limiter: TeamLimiter | None = None,
    ip_limit: IpLimit | None = None,
    limits_of: LimitsOf | None = None,
    pool: BackendPool | None = None,
) -> ASGIApp:
    """Teams of `keys` that are not among `teams` have no limits. Without a `sink` the audit goes to
    the log; without limiters nothing is limited; without a `pool` all models are local."""
    by_name = {name: Team(name) for name in keys.teams} | {team.name: team for team in teams}
    metrics = RouterMetrics()
    accounting = Accounting(by_name, backend, sink or LogSink(), limiter)
    queue = FairQueue(config.max_running_requests)
    pipeline = Pipeline(catalog, backend, metrics, accounting, queue)
    pool = pool or BackendPool([])
    for counter in (pool.requests, pool.fallbacks, pool.rejections):
        metrics.registry.register(counter)
    endpoints = Endpoints(pipeline, Dispatcher(pool, pipeline), keys, config, ip_limit)
    status = StatusEndpoint(catalog, backend, endpoints.authenticate, limits_of, pool.status)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncGenerator[None, None]:
        sweeping = asyncio.create_task(accounting.sweep())
        yield
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        await pool.close()

    app = Starlette(
        routes=_routes(endpoints, status),
        exception_handlers={RouterError: _answer_error, HTTPException: _answer_http_exception},
        lifespan=lifespan,
    )
    return Guard(app, accounting, metrics)


def _routes(endpoints: Endpoints, status: StatusEndpoint) -> list[Route]:
    return [
        Route("/", endpoints.index),
        *CONSOLE_ROUTES,
        Route("/v1/messages", endpoints.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", endpoints.count_tokens, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{model_id:path}", endpoints.model),
        Route("/v1/status", status.status),
        Route("/healthz", endpoints.healthz),
        Route("/readyz", endpoints.readyz),
        Route("/metrics", endpoints.metrics),
        Route("/openapi.json", serve_openapi),
    ]


def _answer_error(request: Request, exc: Exception) -> Response:
    error = cast("RouterError", exc)
    if request.state.account is not None:
        request.state.account.error_code = error.anthropic_type
    if isinstance(error, UpstreamRefusal):
        return Response(error.content, error.upstream_status, media_type=error.content_type)
    return error_response(request.scope, error)


def _answer_http_exception(request: Request, exc: Exception) -> Response:
    exception = cast("HTTPException", exc)
    route = f"{request.method} {request.url.path}"
    if exception.status_code == 405:
        allowed = (exception.headers or {}).get("Allow", "")
        error: RouterError = MethodNotAllowed(f"{route}: method not allowed, use {allowed}")
    else:
        error = NotFound(f"{route}: no such route")
    response = error_response(request.scope, error)
    response.headers.update(exception.headers or {})  # a 405 says what is allowed
    return response
