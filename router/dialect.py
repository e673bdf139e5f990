"""Which dialect a caller speaks, and how it hears of errors."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Scope

from router.errors import RouterError
from router.protocols.anthropic import encode as anthropic
from router.protocols.openai import encode as openai

Dialect = Literal["anthropic", "openai"]


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """By route; where both dialects share one, the `anthropic-version` header decides."""
    if path.startswith("/v1/messages"):
        return "anthropic"
    if path.startswith("/v1/chat/"):
        return "openai"
    return "anthropic" if "anthropic-version" in headers else "openai"


def error_body(dialect: Dialect, error: RouterError, request_id: str) -> dict[str, Any]:
    if dialect == "anthropic":
        return anthropic.error_body(error, request_id)
    return openai.error_body(error)


def error_response(scope: Scope, error: RouterError) -> JSONResponse:
    """The error's body, status and headers in the dialect of the request."""
    dialect = dialect_of(scope["path"], Headers(scope=scope))
    body = error_body(dialect, error, scope["state"]["request_id"])
    return JSONResponse(body, status_code=error.status, headers=error_headers(error))


def error_headers(error: RouterError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.should_retry is not None:
        headers["x-should-retry"] = str(error.should_retry).lower()
    return headers
