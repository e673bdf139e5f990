"""The ASGI app: routes, and a guard around them that gives every answer its ids and every failure
a body in the caller's dialect."""

import logging
import secrets
import time

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.backends.base import Backend
from router.catalog import Catalog
from router.config import RouterConfig
from router.dialect import dialect_of, error_body, error_headers
from router.endpoints import Endpoints
from router.errors import BackendError, MethodNotAllowed, NotFound, RouterError
from router.identity import KeyRing
from router.metrics import RouterMetrics
from router.pipeline import Pipeline

logger = logging.getLogger(__name__)


def create_app(
    *, catalog: Catalog, backend: Backend, keys: KeyRing, config: RouterConfig
) -> ASGIApp:
    metrics = RouterMetrics()
    endpoints = Endpoints(Pipeline(catalog, backend, metrics), keys, config)
    app = Starlette(
        routes=[
            Route("/", endpoints.index),
            Route("/v1/messages", endpoints.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", endpoints.count_tokens, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{model_id:path}", endpoints.model),
            Route("/healthz", endpoints.healthz),
            Route("/readyz", endpoints.readyz),
            Route("/metrics", endpoints.metrics),
        ],
        exception_handlers={RouterError: _answer_error, HTTPException: _answer_http_exception},
    )
    return Guard(app, metrics)


class Guard:
    """Pure ASGI, outermost. Both request id headers go on every answer: each SDK reads its own."""

    def __init__(self, app: ASGIApp, metrics: RouterMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status: int | None = None
        started_s = time.monotonic()

        async def send_with_ids(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_ids)
        except Exception:
            logger.exception("request failed request_id=%s path=%s", request_id, scope["path"])
            if status is None:
                response = _error_response(scope, BackendError("internal error"))
                await response(scope, receive, send_with_ids)
        if status is not None and status >= 400:
            self._metrics.error(status)
        logger.info(
            "request_id=%s method=%s path=%s status=%s duration_ms=%.1f",
            request_id,
            scope["method"],
            scope["path"],
            status,
            (time.monotonic() - started_s) * 1e3,
        )


def _answer_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RouterError)
    return _error_response(request.scope, exc)


def _answer_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    route = f"{request.method} {request.url.path}"
    if exc.status_code == 405:
        allowed = (exc.headers or {}).get("Allow", "")
        return _error_response(
            request.scope, MethodNotAllowed(f"{route}: method not allowed, use {allowed}")
        )
    return _error_response(request.scope, NotFound(f"{route}: no such route"))


def _error_response(scope: Scope, error: RouterError) -> Response:
    headers = Headers(scope=scope)
    body = error_body(dialect_of(scope["path"], headers), error, scope["state"]["request_id"])
    return JSONResponse(body, status_code=error.status, headers=error_headers(error))
