"""The routes: each reads a body, asks the pipeline, and encodes the answer in its dialect."""

import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from router.account import RequestAccount
from router.body import read_body
from router.catalog import ServedModel
from router.chat import ChatRequest
from router.config import RouterConfig
from router.console_routes import accepts_page, console_page
from router.dialect import dialect_of
from router.errors import AuthenticationFailed, InvalidRequest, RouterError
from router.identity import KeyRing, Principal
from router.limits.ip_limit import IpLimit, client_ip
from router.pipeline import Pipeline
from router.protocols.anthropic import encode as anthropic
from router.protocols.anthropic.parse import parse_count_tokens, parse_messages
from router.protocols.base import StreamEncoder
from router.protocols.openai import encode as openai
from router.protocols.openai.parse import parse_chat
from router.sse.codec import encode_event
from router.sse.response import EventStream, until_disconnected

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; logs and metrics do


@dataclass(frozen=True, slots=True)
class Endpoints:
    pipeline: Pipeline
    keys: KeyRing
    config: RouterConfig
    ip_limit: IpLimit | None = None

    async def messages(self, request: Request) -> Response | EventStream:
        account = await self._account(request)
        version = _anthropic_version(request)
        chat = parse_messages(await self._body(request), version)
        message_id = account.request_id.replace("req_", "msg_", 1)
        if chat.stream:
            return self._stream(chat, account, anthropic.MessageStream(message_id, chat.model))
        completions = await until_disconnected(
            request.receive, self.pipeline.complete(chat, account)
        )
        if completions is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(anthropic.message_body(message_id, chat.model, completions[0]))

    async def count_tokens(self, request: Request) -> Response:
        account = await self._account(request)
        version = _anthropic_version(request)
        chat = parse_count_tokens(await self._body(request), version)
        account.model = chat.model
        return JSONResponse(anthropic.count_tokens_body(await self.pipeline.count_tokens(chat)))

    async def chat_completions(self, request: Request) -> Response | EventStream:
        account = await self._account(request)
        chat = parse_chat(await self._body(request))
        completion_id = account.request_id.replace("req_", "chatcmpl-", 1)
        created = int(time.time())
        if chat.stream:
            encoder = openai.ChatCompletionStream(
                completion_id, chat.model, created, chat.num_completions, chat.include_usage
            )
            return self._stream(chat, account, encoder)
        completions = await until_disconnected(
            request.receive, self.pipeline.complete(chat, account)
        )
        if completions is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(openai.completion_body(completion_id, chat.model, created, completions))

    async def models(self, request: Request) -> Response:
        await self.authenticate(request)
        catalog = self.pipeline.catalog
        cards = [(name, catalog.resolve(name)) for name in catalog.names]
        if dialect_of(request.url.path, request.headers) == "openai":
            return JSONResponse(openai.model_list_body([_openai_card(*card) for card in cards]))
        return JSONResponse(
            anthropic.model_list_body([_anthropic_card(*card) for card in cards], **_page(request))
        )

    async def model(self, request: Request) -> Response:
        await self.authenticate(request)
        name = request.path_params["model_id"]
        card = (name, self.pipeline.catalog.resolve(name))
        if dialect_of(request.url.path, request.headers) == "openai":
            return JSONResponse(_openai_card(*card))
        return JSONResponse(_anthropic_card(*card))

    async def index(self, request: Request) -> Response:
        """The web console for browsers; for everybody else a line that says who answers here."""
        await self._count_address(request)
        if accepts_page(request.headers):
            return console_page(request)
        body = {"name": "flashray", "models": list(self.pipeline.catalog.names)}
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

    def _stream(
        self, chat: ChatRequest, account: RequestAccount, encoder: StreamEncoder
    ) -> EventStream:
        def encode_error(error: RouterError) -> bytes:
            account.error_code = error.anthropic_type
            return b"".join(map(encode_event, encoder.error(error)))

        return EventStream(
            self._frames(chat, account, encoder),
            keep_alive_s=self.config.keep_alive_s,
            encode_error=encode_error,
        )

    async def _frames(
        self, chat: ChatRequest, account: RequestAccount, encoder: StreamEncoder
    ) -> AsyncGenerator[bytes, None]:
        running = await self.pipeline.start(chat, account)
        async with contextlib.aclosing(running.events()) as events:
            async for choice, event in events:
                if frame := b"".join(map(encode_event, encoder.encode(choice, event))):
                    yield frame


def _anthropic_version(request: Request) -> str:
    version = request.headers.get("anthropic-version")
    if not version:
        raise InvalidRequest("anthropic-version: header is required", param="anthropic-version")
    return version


def _anthropic_card(name: str, model: ServedModel) -> dict[str, Any]:
    display_name = model.display_name if name == model.id else f"{model.display_name} ({name})"
    return anthropic.model_body(
        name,
        display_name,
        model.created_at,
        model.max_model_len,
        model.max_model_len,
        model.capabilities,
    )


def _openai_card(name: str, model: ServedModel) -> dict[str, Any]:
    return openai.model_body(name, int(model.created_at.timestamp()), owned_by="flashray")


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
