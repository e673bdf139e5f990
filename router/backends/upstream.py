"""An HTTP server that answers for a model: how it is reached, with which key, and what its refusals
mean. Keys come from the environment or a mounted file, are read when used, and are never quoted."""

import abc
import contextlib
import json
import logging
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from router.errors import (
    BackendError,
    BackendUnavailable,
    Overloaded,
    RateLimited,
    RouterError,
    UpstreamRefusal,
)

logger = logging.getLogger(__name__)

Wire = Literal["anthropic", "openai"]

PATHS: dict[Wire, str] = {"anthropic": "/v1/messages", "openai": "/v1/chat/completions"}
MAX_ERROR_BYTES = 256 * 1024
MAX_MESSAGE_CHARACTERS = 1_000
MAX_RETRY_AFTER_S = 60.0  # SDKs sleep for as long as they are told
DEFAULT_RETRY_AFTER_S = 5.0

# What a client may say to an upstream. Keys, cookies and team headers are not among it.
_ALLOWED_HEADERS = frozenset(
    {"accept", "anthropic-beta", "anthropic-version", "content-type", "user-agent"}
)
_CLIENT_CLOCK = frozenset(
    {"x-stainless-read-timeout", "x-stainless-retry-count", "x-stainless-timeout"}
)


def allowed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Of a client's headers (names in lower case), those that go upstream, unchanged."""
    return {
        name: value
        for name, value in headers.items()
        if name in _ALLOWED_HEADERS
        or (name.startswith("x-stainless-") and name not in _CLIENT_CLOCK)
    }


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """One of `api_key_env` and `api_key_file`, or neither for a server that asks for no key.

    `leaves_company`: what is sent there is seen by others. `stall_timeout_s` bounds the silence of
    a stream, `answer_timeout_s` that of a server which writes an answer as a whole.
    """

    name: str
    kind: Literal["direct", "proxy"]
    url: str
    protocol: Wire = "anthropic"
    api_key_env: str | None = None
    api_key_file: Path | None = None
    ca_file: Path | None = None
    leaves_company: bool = True
    connect_timeout_s: float = 5.0
    stall_timeout_s: float = 60.0
    answer_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """`content` goes out as it is; `team` is the caller's."""

    path: str
    content: bytes
    headers: Mapping[str, str]
    team: str
    is_stream: bool
    query: str = ""


class Upstream(abc.ABC):
    """One connection pool to one server. Subclasses say how it knows us."""

    def __init__(
        self, settings: UpstreamSettings, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.settings = settings
        """Raises ValueError for a `ca_file` that holds no certificates."""
        # The environment stays out: a .netrc or proxy variable would send keys elsewhere.
        self._client = httpx.AsyncClient(
            base_url=settings.url,
            verify=True if settings.ca_file is None else _tls_context(settings.ca_file),
            headers={"accept-encoding": "identity"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
            follow_redirects=False,
            trust_env=False,
            transport=transport,
        )

    @abc.abstractmethod
    def credentials(self, key: str | None, team: str) -> dict[str, str]:
        """The headers by which this kind of upstream knows us. `key` None: it asks for none."""

    @contextlib.asynccontextmanager
    async def send(self, request: UpstreamRequest) -> AsyncGenerator[httpx.Response, None]:
        """The response, status 200, its body unread. Leaving cancels what is not read.

        Raises UpstreamRefusal for what the caller did wrong, RateLimited and Overloaded with the
        wait the upstream asks for, BackendError otherwise, also for a body that breaks off.
        """
        key = self._key()
        headers = {**request.headers, **self.credentials(key, request.team)}
        wait_s = self.settings.stall_timeout_s
        read_s = wait_s if request.is_stream else self.settings.answer_timeout_s
        url = f"{request.path}?{request.query}" if request.query else request.path
        timeout = httpx.Timeout(read_s, connect=self.settings.connect_timeout_s, write=wait_s)
        try:
            async with self._client.stream(
                "POST", url, content=request.content, headers=headers, timeout=timeout
            ) as response:
                if response.status_code != 200:
                    raise self._refusal(response, await _start_of(response), key)
                yield response
        except httpx.TimeoutException as exc:
            raise BackendUnavailable(
                f"{self.settings.name}: no byte within {read_s:g} s", retry_after_s=5
            ) from exc
        except (httpx.TransportError, httpx.DecodingError, httpx.StreamError) as exc:
            raise BackendUnavailable(
                f"{self.settings.name}: the connection failed ({type(exc).__name__})",
                retry_after_s=5,
            ) from exc

    async def close(self) -> None:
        await self._client.aclose()

    def _key(self) -> str | None:
        """Read each time: mounted secrets are replaced while we run."""
        settings = self.settings
        try:
            if settings.api_key_env is not None:
                return os.environ[settings.api_key_env].strip()
            if settings.api_key_file is not None:
                return settings.api_key_file.read_text().strip()
        except (KeyError, OSError):
            where = settings.api_key_env or settings.api_key_file
            raise BackendUnavailable(f"{settings.name}: its key is missing from {where}") from None
        return None

    def _refusal(self, response: httpx.Response, body: bytes, key: str | None) -> RouterError:
        name, status = self.settings.name, response.status_code
        if key:
            body = body.replace(key.encode(), b"[key]")
        error = error_of(_json(body))
        message = f"{name}: HTTP {status}" + (f": {error.message}" if error else "")
        if status == 429:
            return RateLimited(message, retry_after_s=_retry_after_s(response))
        if status == 529:
            return Overloaded(message, retry_after_s=_retry_after_s(response))
        if status in (401, 402, 403, 407):
            logger.error("upstream refuses our credentials backend=%s status=%d", name, status)
            return BackendError(f"{name}: refuses this router's credentials (HTTP {status})")
        if 400 <= status < 500:
            content_type = response.headers.get("content-type", "application/json")
            said = error.message if error else f"{name} answered HTTP {status}"
            return UpstreamRefusal(
                said, upstream_status=status, content=body, content_type=content_type
            )
        if status in (502, 503, 504):
            return BackendUnavailable(message, retry_after_s=DEFAULT_RETRY_AFTER_S)
        return BackendError(message)


def error_of(payload: Any) -> RouterError | None:
    """What a JSON answer of either dialect says went wrong; None when it is no error."""
    if not isinstance(payload, dict):
        return None
    error = payload.get("error")
    if not error and payload.get("type") != "error":
        return None
    error = error if isinstance(error, dict) else {"message": error}
    kind = str(error.get("type") or error.get("code") or "")
    message = str(error.get("message") or kind or "unknown error")[:MAX_MESSAGE_CHARACTERS]
    if "overloaded" in kind:
        return Overloaded(message, retry_after_s=DEFAULT_RETRY_AFTER_S)
    if "rate_limit" in kind:
        return RateLimited(message, retry_after_s=DEFAULT_RETRY_AFTER_S)
    return BackendError(message)


def _tls_context(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as exc:
        raise ValueError(f"ca_file {ca_file}: expected certificates in PEM, got {exc}") from exc


async def _start_of(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_ERROR_BYTES:
            break
    return bytes(body[:MAX_ERROR_BYTES])


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _retry_after_s(response: httpx.Response) -> float | None:
    """None when it says none, or a date."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            wait_s = float(response.headers[name]) * unit_s
        except (KeyError, ValueError):
            continue
        if 0 <= wait_s < float("inf"):
            return min(wait_s, MAX_RETRY_AFTER_S)
    return None
