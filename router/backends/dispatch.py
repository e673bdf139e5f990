"""A request on a routed model: its targets in order, until one of them has begun to answer."""

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import httpx
from starlette.responses import JSONResponse, Response

from router.account import RequestAccount
from router.backends.attempts import MENDABLE, Attempts
from router.backends.meter import UpstreamMeter
from router.backends.passthrough import (
    forwarded_answer,
    forwarded_frames,
    require_stream,
    whole_body,
)
from router.backends.pool import BackendPool
from router.backends.reader import BYTES_PER_TOKEN, EventReader
from router.backends.translate import ANTHROPIC_VERSION, translated_body, translated_refusal
from router.backends.upstream import PATHS, Upstream, UpstreamRequest, allowed_headers
from router.call import ClientCall
from router.completion import Completion
from router.errors import (
    InvalidRequest,
    NotFound,
    RequestTooLarge,
    RouterError,
    UnsupportedFeature,
    UpstreamRefusal,
)
from router.events import Finished, Started, TextEvent
from router.limits.policy import MAX_EST_OUTPUT_TOKENS, est_output_tokens
from router.pipeline import ChoiceEvent, Pipeline
from router.protocols.anthropic.encode import count_tokens_body
from router.routes import LOCAL, Route, Target
from router.sse.codec import EventDecoder, encode_event
from router.sse.replay_log import ReplayLog

logger = logging.getLogger(__name__)

COUNT_PATH = "/v1/messages/count_tokens"

# Of these, a target failed; others (a cut connection of the client's) end the request.
_FAILURES = (*MENDABLE, InvalidRequest, NotFound, RequestTooLarge)


@dataclass(frozen=True, slots=True)
class Dispatcher:
    pool: BackendPool
    pipeline: Pipeline
    replay_log: ReplayLog = field(default_factory=ReplayLog)

    def route_of(self, call: ClientCall) -> Route | None:
        """None for a model that no route names. Raises InvalidRequest."""
        return self.pool.table.find(call.body.model) if self.pool.table.routes else None

    async def answer(self, route: Route, call: ClientCall, account: RequestAccount) -> Response:
        """The answer as a whole. Raises RouterError."""
        attempts = await self._admit(route, call, account)
        while True:
            target = await self._next(attempts, account)
            try:
                return await self._answer(target, call, account)
            except _FAILURES as failure:
                self._failed(attempts, target, failure, account)

    async def frames(
        self, route: Route, call: ClientCall, account: RequestAccount
    ) -> AsyncGenerator[bytes, None]:
        """The pieces of a streamed answer. Raises RouterError, after a piece or before any."""
        attempts = await self._admit(route, call, account)
        while True:
            target = await self._next(attempts, account)
            has_begun = False
            try:
                async with contextlib.aclosing(self._frames(target, call, account)) as frames:
                    async for frame in frames:
                        has_begun = True
                        yield frame
                return
            except _FAILURES as failure:
                if has_begun:
                    raise
                self._failed(attempts, target, failure, account)

    async def count_tokens(
        self, route: Route, call: ClientCall, account: RequestAccount
    ) -> Response:
        """The first target that can count. Says nothing about anyone's health."""
        team = self.pipeline.accounting.team_of(account)
        failure: RouterError | None = None
        for target in self.pool.targets(route, team)[:2]:
            account.model, account.backend = target.model, target.backend
            try:
                return await self._count(target, call, team.name)
            except MENDABLE as exc:
                failure = exc
        assert failure is not None, "a route has targets"
        raise failure

    async def _admit(self, route: Route, call: ClientCall, account: RequestAccount) -> Attempts:
        """Reserve a guess; what the answer really cost is settled at its end."""
        accounting = self.pipeline.accounting
        account.model, account.is_stream = route.model, call.body.is_stream
        targets = self.pool.targets(route, accounting.team_of(account))
        await accounting.reserve(account, route.model, *_est_tokens(call))
        return Attempts(targets, self.pool)

    async def _next(self, attempts: Attempts, account: RequestAccount) -> Target:
        target = await attempts.next_target()
        account.model, account.backend = target.model, target.backend
        account.num_attempts = attempts.num_upstream
        return target

    def _failed(
        self, attempts: Attempts, target: Target, failure: RouterError, account: RequestAccount
    ) -> None:
        """Raises the failure when it is the client's, and the first target's."""
        if attempts.is_first and not isinstance(failure, MENDABLE):
            raise failure
        attempts.failed(failure)
        logger.warning(
            "target failed request_id=%s backend=%s error=%s",
            account.request_id,
            target.backend,
            type(failure).__name__,  # its message may quote the conversation
        )

    async def _answer(self, target: Target, call: ClientCall, account: RequestAccount) -> Response:
        if target.backend == LOCAL:
            chat = replace(call.chat, model=target.model)
            completions = await self.pipeline.complete(chat, account)
            return JSONResponse(call.answer(completions))
        if self._speaks_otherwise(target, call):
            completions = [Completion()]
            async with contextlib.aclosing(self._translated(target, call, account)) as events:
                async for choice, event in events:
                    completions[choice].add(event)
            return JSONResponse(call.answer(completions))
        async with self._sent(target, call, account) as (response, reader, meter):
            content = await forwarded_answer(response, reader, meter)
        return Response(content, media_type=response.headers.get("content-type"))

    async def _frames(
        self, target: Target, call: ClientCall, account: RequestAccount
    ) -> AsyncGenerator[bytes, None]:
        if target.backend == LOCAL:
            frames = _encoded(call, self._local(target, call, account))
        elif self._speaks_otherwise(target, call):
            frames = _encoded(call, self._translated(target, call, account))
        else:
            frames = self._forwarded(target, call, account)
        request_id, is_logged = account.request_id, target.backend != LOCAL
        owner = self.pipeline.accounting.team_of(account).name
        async with contextlib.aclosing(frames):
            async for frame in frames:
                if is_logged:
                    self.replay_log.append(request_id, owner, frame)
                yield frame
        self.replay_log.complete(request_id)

    async def _local(
        self, target: Target, call: ClientCall, account: RequestAccount
    ) -> AsyncGenerator[ChoiceEvent, None]:
        running = await self.pipeline.start(replace(call.chat, model=target.model), account)
        async with contextlib.aclosing(running.events()) as events:
            async for event in events:
                yield event

    async def _forwarded(
        self, target: Target, call: ClientCall, account: RequestAccount
    ) -> AsyncGenerator[bytes, None]:
        async with self._sent(target, call, account) as (response, reader, meter):
            async with contextlib.aclosing(forwarded_frames(response, reader, meter)) as frames:
                async for frame in frames:
                    yield frame
            if reader.error is not None:
                account.error_code = reader.error.anthropic_type

    async def _translated(
        self, target: Target, call: ClientCall, account: RequestAccount
    ) -> AsyncGenerator[ChoiceEvent, None]:
        try:
            async with (
                self._sent(target, call, account) as (response, reader, meter),
                contextlib.aclosing(_text_events(response, reader, meter)) as events,
            ):
                async for event in events:
                    yield 0, event
        except UpstreamRefusal as refusal:
            raise translated_refusal(refusal) from refusal

    @contextlib.asynccontextmanager
    async def _sent(
        self, target: Target, call: ClientCall, account: RequestAccount
    ) -> AsyncGenerator[tuple[httpx.Response, EventReader, UpstreamMeter], None]:
        """The answer of one upstream, unread; judged, metered and given a place in line."""
        upstream = self.pool.upstreams[target.backend]
        team = self.pipeline.accounting.team_of(account)
        reader = EventReader(upstream.settings.protocol)
        meter = UpstreamMeter(
            account, target.backend, reader.fold, len(call.body.content), self.pipeline.metrics
        )
        async with self.pipeline.queue.slot(team, sum(_est_tokens(call))):
            try:
                with self.pool.judged(target.backend) as verdict:
                    request = _upstream_request(target, upstream, call, team.name)
                    async with upstream.send(request) as response:
                        account.upstream_request_id = _request_id(response)
                        meter.observe()
                        yield response, reader, meter
                        verdict.has_failed = reader.error is not None
            except RouterError:
                if not reader.fold.has_content:
                    meter.forget()
                raise

    async def _count(self, target: Target, call: ClientCall, team: str) -> Response:
        if target.backend == LOCAL:
            chat = replace(call.chat, model=target.model)
            return JSONResponse(count_tokens_body(await self.pipeline.count_tokens(chat)))
        upstream = self.pool.upstreams[target.backend]
        if upstream.settings.protocol != "anthropic":
            raise UnsupportedFeature(
                f"model: the backend of {call.body.model} cannot count tokens", param="model"
            )
        content, headers = call.body.with_model(target.model), allowed_headers(call.headers)
        request = UpstreamRequest(
            COUNT_PATH, content, headers, team, is_stream=False, query=call.query
        )
        async with upstream.send(request) as response:
            content = await whole_body(response)
        return Response(content, media_type=response.headers.get("content-type"))

    def _speaks_otherwise(self, target: Target, call: ClientCall) -> bool:
        return self.pool.upstreams[target.backend].settings.protocol != call.wire


def _upstream_request(
    target: Target, upstream: Upstream, call: ClientCall, team: str
) -> UpstreamRequest:
    wire = upstream.settings.protocol
    if wire == call.wire:
        content, headers = call.body.with_model(target.model), allowed_headers(call.headers)
        is_stream, query = call.body.is_stream, call.query
        return UpstreamRequest(PATHS[wire], content, headers, team, is_stream, query)
    content = translated_body(call.chat, target.model, wire)
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    if wire == "anthropic":
        headers["anthropic-version"] = ANTHROPIC_VERSION
    return UpstreamRequest(PATHS[wire], content, headers, team, is_stream=True)


async def _text_events(
    response: httpx.Response, reader: EventReader, meter: UpstreamMeter
) -> AsyncGenerator[TextEvent, None]:
    await require_stream(response)
    decoder = EventDecoder()
    async for chunk in response.aiter_bytes():
        for event in decoder.decode(chunk):
            events = reader.read(event)
            meter.observe()
            if reader.error is not None:
                raise reader.error
            for text_event in events:
                yield _counted(text_event, meter)
            if reader.fold.is_finished:
                return
    for text_event in reader.fold.end():
        meter.observe()
        yield _counted(text_event, meter)


def _counted(event: TextEvent, meter: UpstreamMeter) -> TextEvent:
    """With the usage that the audit has, also where the upstream gave none."""
    if isinstance(event, Started):
        return Started(replace(meter.usage, completion_tokens=0, reasoning_tokens=0))
    if isinstance(event, Finished):
        return replace(event, usage=meter.usage)
    return event


async def _encoded(
    call: ClientCall, events: AsyncGenerator[ChoiceEvent, None]
) -> AsyncGenerator[bytes, None]:
    """Frames of the client's dialect; what comes before the first content waits for it."""
    encoder, held = call.encoder(), b""
    async with contextlib.aclosing(events):
        async for choice, event in events:
            held += b"".join(map(encode_event, encoder.encode(choice, event)))
            if held and not isinstance(event, Started):
                yield held
                held = b""


def _est_tokens(call: ClientCall) -> tuple[int, int]:
    """Of the prompt and of the answer."""
    max_tokens = call.body.max_tokens
    output = MAX_EST_OUTPUT_TOKENS if max_tokens is None else est_output_tokens(max_tokens)
    return max(1, len(call.body.content) // BYTES_PER_TOKEN), output


def _request_id(response: httpx.Response) -> str | None:
    request_id = response.headers.get("request-id") or response.headers.get("x-request-id")
    return request_id[:128] if request_id and request_id.isascii() else None
