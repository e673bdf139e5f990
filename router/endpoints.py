"""The routes: each reads a body, asks the pipeline, and encodes the answer in its dialect."""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.account import RequestAccount
from router.backends.dispatch import Dispatcher
from router.body import read_body
from router.call import ClaudeCall, ClientCall, OpenAICall
from router.capabilities import Capability
from router.catalog import ServedModel
from router.config import RouterConfig
from router.console_routes import accepts_page, console_page
from router.dialect import dialect_of
from router.errors import AuthenticationFailed, InvalidRequest, RouterError
from router.identity import KeyRing, Principal
from router.limits.ip_limit import IpLimit, client_ip
from router.pipeline import Pipeline
from router.protocols.anthropic import encode as anthropic
from router.protocols.openai import encode as openai
from router.routes import Route
from router.sse.codec import encode_event
from router.sse.response import EventStream, until_disconnected

_EPOCH = datetime.fromtimestamp(0, UTC)  # the date of a model that is not ours to date
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; logs and metrics do


@dataclass(frozen=True, slots=True)
class Endpoints:
    pipeline: Pipeline
    dispatcher: Dispatcher
    keys: KeyRing
    config: RouterConfig
    ip_limit: IpLimit | None = None

    async def messages(self, request: Request) -> Response | EventStream:
        account = await self._account(request)
        version = _anthropic_version(request)
        content, headers = await self._body(request), dict(request.headers)
        call = ClaudeCall(account.request_id, content, headers, _query(request), version)
        return await self._answer(request, call, account)

    async def chat_completions(self, request: Request) -> Response | EventStream:
        account = await self._account(request)
        content, headers = await self._body(request), dict(request.headers)
        call = OpenAICall(account.request_id, content, headers)
        return await self._answer(request, call, account)

    async def count_tokens(self, request: Request) -> Response:
        account = await self._account(request)
        version = _anthropic_version(request)
        content, headers = await self._body(request), dict(request.headers)
        call = ClaudeCall(
            account.request_id, content, headers, _query(request), version, is_count=True
        )
        route = self.dispatcher.route_of(call)
        if route is not None:
            return await self.dispatcher.count_tokens(route, call, account)
        account.model = call.chat.model
        num_tokens = await self.pipeline.count_tokens(call.chat)
        return JSONResponse(anthropic.count_tokens_body(num_tokens))

    async def models(self, request: Request) -> Response:
        await self.authenticate(request)
        cards = [(name, self._model(name)) for name in self._names()]
        if dialect_of(request.url.path, request.headers) == "openai":
            return JSONResponse(openai.model_list_body([_openai_card(*card) for card in cards]))
        return JSONResponse(
            anthropic.model_list_body([_anthropic_card(*card) for card in cards], **_page(request))
        )

    async def model(self, request: Request) -> Response:
        await self.authenticate(request)
        name = request.path_params["model_id"]
        card = (name, self._model(name))
        if dialect_of(request.url.path, request.headers) == "openai":
            return JSONResponse(_openai_card(*card))
        return JSONResponse(_anthropic_card(*card))

    async def index(self, request: Request) -> Response:
        """The web console for browsers; for everybody else a line that says who answers here."""
        await self._count_address(request)
        if accepts_page(request.headers):
            return console_page(request)
        body = {"name": "flashray", "models": list(self._names())}
        return JSONResponse(body, headers={"vary": "accept"})

    async def healthz(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(self, _request: Request) -> Response:
        status = await self.pipeline.backend.status()
        if status.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": status.reason}, status_code=503)

    async def metrics(self, request: Request) -> Response:
        await self._count_address(request)
        status = await self.pipeline.backend.status()
        return Response(
            self.pipeline.metrics.render(status), media_type="text/plain; version=0.0.4"
        )

    def _names(self) -> tuple[str, ...]:
        """Served models, their aliases, then what only routes name."""
        served, routed = self.pipeline.catalog.names, self.dispatcher.pool.table.names
        return (*served, *(name for name in routed if name not in served))

    def _model(self, name: str) -> ServedModel | Route:
        """Raises ModelNotFound."""
        return self.dispatcher.pool.table.find(name) or self.pipeline.catalog.resolve(name)

    async def authenticate(self, request: Request) -> Principal:
        """Raises AuthenticationFailed; RateLimited for an address that keeps guessing."""
        try:
            return self.keys.authenticate(request.headers)
        except AuthenticationFailed:
            await self._count_address(request)
            raise

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self.config.max_body_bytes)

    async def _account(self, request: Request) -> RequestAccount:
        """The account that the guard opened, with its caller in it."""
        account: RequestAccount = request.state.account
        account.principal = await self.authenticate(request)
        return account

    async def _count_address(self, request: Request) -> None:
        """Where no key is asked for, or none was right. Probes (/healthz, /readyz) are free."""
        if self.ip_limit is None or request.client is None:
            return
        forwarded_for = request.headers.getlist("x-forwarded-for")
        trusted = self.config.trusted_proxies
        await self.ip_limit.check(client_ip(request.client.host, forwarded_for, trusted))

    async def _answer(
        self, request: Request, call: ClientCall, account: RequestAccount
    ) -> Response | EventStream:
        """By the route of the model, or by the local engine where there is none."""
        route = self.dispatcher.route_of(call)
        if route is None:
            if call.chat.stream:
                return self._stream(self._frames(call, account), call, account)
            work = self._whole(call, account)
        elif call.body.is_stream:
            return self._stream(self.dispatcher.frames(route, call, account), call, account)
        else:
            work = self.dispatcher.answer(route, call, account)
        answer = await until_disconnected(request.receive, work)
        return Response(status_code=CLIENT_CLOSED_REQUEST) if answer is None else answer

    def _stream(
        self, frames: AsyncGenerator[bytes, None], call: ClientCall, account: RequestAccount
    ) -> EventStream:
        def encode_error(error: RouterError) -> bytes:
            account.error_code = error.anthropic_type
            return call.error_frame(error)

        return EventStream(frames, keep_alive_s=self.config.keep_alive_s, encode_error=encode_error)

    async def _whole(self, call: ClientCall, account: RequestAccount) -> Response:
        return JSONResponse(call.answer(await self.pipeline.complete(call.chat, account)))

    async def _frames(
        self, call: ClientCall, account: RequestAccount
    ) -> AsyncGenerator[bytes, None]:
        encoder = call.encoder()
        running = await self.pipeline.start(call.chat, account)
        async with contextlib.aclosing(running.events()) as events:
            async for choice, event in events:
                if frame := b"".join(map(encode_event, encoder.encode(choice, event))):
                    yield frame


def _query(request: Request) -> str:
    """The one parameter that an upstream is told: older SDKs mark beta requests with it."""
    return "beta=true" if request.query_params.get("beta") == "true" else ""


def _anthropic_version(request: Request) -> str:
    version = request.headers.get("anthropic-version")
    if not version:
        raise InvalidRequest("anthropic-version: header is required", param="anthropic-version")
    return version


def _anthropic_card(name: str, model: ServedModel | Route) -> dict[str, Any]:
    if isinstance(model, Route):
        can = frozenset(Capability)
        max_input_tokens, max_tokens = model.max_input_tokens, model.max_tokens
        return anthropic.model_body(name, name, _EPOCH, max_input_tokens, max_tokens, can)
    display_name = model.display_name if name == model.id else f"{model.display_name} ({name})"
    return anthropic.model_body(
        name,
        display_name,
        model.created_at,
        model.max_model_len,
        model.max_model_len,
        model.capabilities,
    )


def _openai_card(name: str, model: ServedModel | Route) -> dict[str, Any]:
    created_at = _EPOCH if isinstance(model, Route) else model.created_at
    return openai.model_body(name, int(created_at.timestamp()), owned_by="flashray")


def _page(request: Request) -> dict[str, Any]:
    """The paging parameters that came. Raises InvalidRequest."""
    page: dict[str, Any] = {
        name: request.query_params[name]
        for name in ("after_id", "before_id")
        if name in request.query_params
    }
    limit = request.query_params.get("limit")
    if limit is not None:
        if not limit.isdecimal():
            raise InvalidRequest(f"limit: expected a whole number, got {limit!r}", param="limit")
        page["limit"] = int(limit)
    return page
