"""A backend of scripted completions: real journals of tokens, no engine."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from router.backends.base import BackendStatus, OrphanedGeneration
from router.errors import NotFound, RouterError
from router.generation import (
    FinishReason,
    GenerationRequest,
    TokenEvent,
    TokenLogprobs,
    Usage,
)


@dataclass
class FakeBackend:
    """Answers every request with `token_ids`, `tokens_per_event` at a time, cut at max_tokens.

    `gate`, when set, must be released once for each event; `fail_at` raises `error` instead of
    the event with that number; `cached_tokens` is what usage reports.
    """

    token_ids: tuple[int, ...] = ()
    tokens_per_event: int = 3
    cached_tokens: int = 0
    gate: asyncio.Semaphore | None = None
    error: RouterError | None = None
    fail_at: int | None = None
    refuse: RouterError | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_sent: dict[str, int] = field(default_factory=dict)
    ready: bool = True
    loses_usage: bool = False
    acknowledged: list[str] = field(default_factory=list)
    orphans: list[OrphanedGeneration] = field(default_factory=list)

    async def submit(self, request: GenerationRequest) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        self.num_sent[request.request_id] = 0

    async def subscribe(
        self, request_id: str, after_index: int = 0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        request = next((r for r in self.requests if r.request_id == request_id), None)
        if request is None:
            raise NotFound(f"generation {request_id} is unknown")
        for number, event in enumerate(self._events(request)):
            if self.gate is not None:
                await self.gate.acquire()
            if self.error is not None and self.fail_at == number:
                raise self.error
            self.num_sent[request_id] = event.usage.completion_tokens
            if event.index >= after_index:
                yield [event]

    async def abort(self, request_id: str) -> Usage | None:
        self.aborted.append(request_id)
        if self.loses_usage:
            return None
        request = next(r for r in self.requests if r.request_id == request_id)
        return self._usage(request, self.num_sent[request_id])

    async def acknowledge(self, request_ids: Sequence[str]) -> None:
        self.acknowledged += request_ids

    async def claim_orphans(self) -> list[OrphanedGeneration]:
        orphans, self.orphans = self.orphans, []
        return orphans

    async def status(self) -> BackendStatus:
        return BackendStatus(self.ready, "" if self.ready else "loading", num_blocks=10)

    def _events(self, request: GenerationRequest) -> list[TokenEvent]:
        limit = request.sampling.max_tokens
        ids = self.token_ids[:limit]
        cut = len(self.token_ids) > limit
        step = self.tokens_per_event
        chunks = [(i, ids[i : i + step]) for i in range(0, len(ids), step)] or [(0, ())]
        return [
            TokenEvent(
                request_id=request.request_id,
                index=index,
                token_ids=chunk,
                usage=self._usage(request, index + len(chunk)),
                logprobs=self._logprobs(request, chunk),
                finish_reason=self._reason(cut) if index == chunks[-1][0] else None,
            )
            for index, chunk in chunks
        ]

    def _reason(self, cut: bool) -> FinishReason:
        return FinishReason.LENGTH if cut or not self.token_ids else FinishReason.STOP_TOKEN

    def _logprobs(self, request: GenerationRequest, chunk: tuple[int, ...]) -> tuple:
        num = request.sampling.num_logprobs
        if num is None:
            return ()
        return tuple(
            TokenLogprobs(-0.5, tuple((token + i, -0.5 - i) for i in range(num))) for token in chunk
        )

    def _usage(self, request: GenerationRequest, num_tokens: int) -> Usage:
        return Usage(len(request.prompt_token_ids), self.cached_tokens, num_tokens)
