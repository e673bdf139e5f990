"""All generations of one reader in one stream: what a step gave them crosses processes at once."""

import asyncio
from collections.abc import AsyncGenerator

from deployments.journal import Journal
from router.errors import RouterError
from router.generation import TokenEvent

IDLE_S = 1.0  # without a generation; then the stream ends, and keeps no replica from ending


class Feed:
    """The generations of a reader that have not ended. Owned by one event loop.

    `add` before or after `open`; until then nobody reads, and the leases run.
    """

    def __init__(self) -> None:
        self._journals: dict[str, Journal] = {}
        self._next_index: dict[str, int] = {}
        self._changed: dict[str, Journal] = {}
        self._has_changed = asyncio.Event()
        self._is_open = False

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def journals(self) -> list[Journal]:
        return list(self._journals.values())

    def add(self, journal: Journal) -> None:
        request_id = journal.request.request_id
        self._journals[request_id] = journal
        self._next_index[request_id] = 0
        journal.num_readers += self._is_open
        journal.on_change = self._note
        if journal.num_tokens or journal.has_ended:
            self._note(journal)

    def open(self) -> None:
        self._is_open = True
        for journal in self._journals.values():
            journal.num_readers += 1

    async def read(self) -> AsyncGenerator[list[TokenEvent], None]:
        """What came since the last time, coalesced, an event of each generation; ends when there is
        none for IDLE_S. Raises the error of one that broke: then the engine has, and all have."""
        while await self._wait():
            changed, self._changed = self._changed, {}
            error: RouterError | None = None
            events: list[TokenEvent] = []
            for request_id, journal in changed.items():
                error = error or journal.error
                if journal.error is None and request_id in self._journals:
                    events.append(self._next_event(request_id, journal))
            if events:
                yield events
            if error is not None:
                raise error

    async def _wait(self) -> bool:
        """Until something has changed; False when nothing will: there has been no generation for so
        long, and there is none now."""
        while not self._has_changed.is_set():
            try:
                async with asyncio.timeout(None if self._journals else IDLE_S):
                    await self._has_changed.wait()
            except TimeoutError:
                if not self._journals:
                    return False
        self._has_changed.clear()
        return True

    def _next_event(self, request_id: str, journal: Journal) -> TokenEvent:
        event = journal.event_from(self._next_index[request_id])
        self._next_index[request_id] = journal.num_tokens
        if event.finish_reason is not None:
            self._drop(request_id)
        return event

    def _drop(self, request_id: str) -> None:
        journal = self._journals.pop(request_id)
        del self._next_index[request_id]
        journal.on_change = None
        journal.num_readers -= self._is_open

    def leave(self, request_id: str) -> Journal | None:
        """Read this generation no more; None when it has ended or is not of this feed."""
        journal = self._journals.get(request_id)
        if journal is not None:
            self._drop(request_id)
        return journal

    def _note(self, journal: Journal) -> None:
        self._changed[journal.request.request_id] = journal
        self._has_changed.set()
