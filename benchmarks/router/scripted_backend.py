"""The script as a backend of token ids: in the router's process, or as a Serve deployment."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence

from benchmarks.router.script import UPSTREAM_LATENCY_MS
from router.backends.base import BackendStatus, OrphanedGeneration
from router.errors import NotFound
from router.generation import FinishReason, GenerationRequest, TokenEvent, Usage


class ScriptedBackend:
    """After the upstream's latency, one event a token, all in one list. The latency as slept, not
    as asked for, is the event loop's; what it oversleeps counts against the router."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = tuple(token_ids)
        self._prompt_tokens: dict[str, int] = {}

    async def submit(self, request: GenerationRequest) -> None:
        self._prompt_tokens[request.request_id] = len(request.prompt_token_ids)

    async def subscribe(
        self, request_id: str, after_index: int = 0
    ) -> AsyncGenerator[list[TokenEvent], None]:
        if request_id not in self._prompt_tokens:
            raise NotFound(f"generation {request_id} is unknown")
        await asyncio.sleep(UPSTREAM_LATENCY_MS / 1e3)
        yield self._events(request_id)[after_index:]

    async def abort(self, request_id: str) -> Usage | None:
        prompt_tokens = self._prompt_tokens.get(request_id)
        return None if prompt_tokens is None else Usage(prompt_tokens, 0, 0)

    async def acknowledge(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._prompt_tokens.pop(request_id, None)

    async def claim_orphans(self) -> list[OrphanedGeneration]:
        return []

    async def status(self) -> BackendStatus:
        return BackendStatus(ready=True, reason="", num_running=len(self._prompt_tokens))

    def _events(self, request_id: str) -> list[TokenEvent]:
        num_tokens = len(self._token_ids)
        return [
            TokenEvent(
                request_id,
                index,
                (token_id,),
                Usage(self._prompt_tokens[request_id], 0, index + 1),
                finish_reason=FinishReason.STOP_TOKEN if index == num_tokens - 1 else None,
            )
            for index, token_id in enumerate(self._token_ids)
        ]


class ScriptedEngine:
    """What the local backend asks of an engine's deployment: the script, and one replica."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._script = ScriptedBackend(token_ids)
        self._outboxes: defaultdict[str, asyncio.Queue[list[TokenEvent]]] = defaultdict(
            asyncio.Queue
        )
        self._answering: set[asyncio.Task[None]] = set()

    async def submit(
        self, request: GenerationRequest, avoid: tuple[str, ...] = (), reader: str = ""
    ) -> str:
        await self._script.submit(request)
        answering = asyncio.create_task(self._answer(request.request_id, self._outboxes[reader]))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        return "only"

    async def follow(
        self, reader: str, replica: str = ""
    ) -> AsyncGenerator[list[TokenEvent], None]:
        while True:
            yield await self._outboxes[reader].get()

    async def leave(self, reader: str, request_id: str, replica: str = "") -> None:
        """Nothing here is aborted."""

    async def locate(self, request_id: str) -> str:
        return "only"

    async def subscribe(
        self, request_id: str, after_index: int = 0, replica: str = ""
    ) -> AsyncGenerator[list[TokenEvent], None]:
        async for events in self._script.subscribe(request_id, after_index):
            yield events

    async def abort(self, request_id: str, replica: str = "") -> Usage | None:
        return await self._script.abort(request_id)

    async def acknowledge(self, request_ids: list[str], replica: str = "") -> None:
        await self._script.acknowledge(request_ids)

    async def claim_orphans(self) -> list[OrphanedGeneration]:
        return []

    async def status(self) -> BackendStatus:
        return await self._script.status()

    async def _answer(self, request_id: str, outbox: asyncio.Queue[list[TokenEvent]]) -> None:
        async for events in self._script.subscribe(request_id):
            outbox.put_nowait(events)

    async def renew(self, request_ids: list[str]) -> None:
        """Nothing here has a lease."""
