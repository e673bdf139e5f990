"""The outermost ring, pure ASGI: every answer gets its ids and limits, every failure a body in the
caller's dialect, every request an account that is closed however it ends."""

import asyncio
import logging
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.account import RequestAccount
from router.accounting import Accounting
from router.dialect import Dialect, dialect_of, error_response
from router.errors import BackendError
from router.limits.headers import anthropic_headers, openai_headers
from router.metrics import RouterMetrics

logger = logging.getLogger(__name__)

AUDITED_ROUTES = frozenset({"/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"})


class Guard:
    """Both request id headers go on every answer: each SDK reads its own."""

    def __init__(self, app: ASGIApp, accounting: Accounting, metrics: RouterMetrics) -> None:
        self._app = app
        self._accounting = accounting
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            logger.exception("request failed %s", answer)
            if answer.status is None:
                response = error_response(scope, BackendError("internal error"))
                await response(scope, receive, answer.send)
        finally:
            await asyncio.shield(asyncio.create_task(self._close(answer)))

    async def _close(self, answer: "_Answer") -> None:
        if answer.account is not None:
            await self._accounting.close(answer.account, answer.status)
        if answer.status is not None and answer.status >= 400:
            self._metrics.error(answer.status)
        logger.info("%s", answer)


class _Answer:
    """One request and what has been said to it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.status: int | None = None
        self.request_id = f"req_{secrets.token_hex(12)}"
        self._route = f"{scope['method']} {scope['path']}"
        self._started_s = time.monotonic()
        self._send = send
        self._dialect: Dialect = dialect_of(scope["path"], Headers(scope=scope))
        self.account: RequestAccount | None = None
        if scope["method"] == "POST" and scope["path"] in AUDITED_ROUTES:
            self.account = RequestAccount(self.request_id, self._dialect, scope["path"])
        # A state of this request alone: servers hand the same one to several requests.
        scope["state"] = {
            **scope.get("state", {}),
            "request_id": self.request_id,
            "account": self.account,
        }

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["request-id"] = headers["x-request-id"] = self.request_id
            headers.update(self._limit_headers())
            headers.update(self._backend_headers())
        await self._send(message)

    def _limit_headers(self) -> dict[str, str]:
        if self.account is None or self.account.admission is None:
            return {}
        if self._dialect == "anthropic":
            return anthropic_headers(self.account.admission)
        return openai_headers(self.account.admission)

    def _backend_headers(self) -> dict[str, str]:
        """Who answered, where routes decide that."""
        if self.account is None or not self.account.backend:
            return {}
        headers = {"x-flashray-backend": self.account.backend}
        if self.account.upstream_request_id is not None:
            headers["x-upstream-request-id"] = self.account.upstream_request_id
        return headers

    def __str__(self) -> str:
        duration_ms = (time.monotonic() - self._started_s) * 1e3
        return (
            f"request_id={self.request_id} route={self._route!r} status={self.status} "
            f"duration_ms={duration_ms:.1f}"
        )
