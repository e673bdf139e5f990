"""What the engines send this router of the generations that it submitted: one stream from each of
them, a journal of each generation, from which its reader takes all that is there."""

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Callable
from contextvars import Context
from dataclasses import dataclass

from deployments.journal import Journal
from router.errors import BackendUnavailable, NotFound, RouterError
from router.generation import GenerationRequest, TokenEvent


@dataclass(frozen=True, slots=True)
class Stream:
    """`reader` names this router to the engine; `replica` is the engine's tag."""

    reader: str
    replica: str


Follow = Callable[[Stream], AsyncGenerator[list[TokenEvent], None]]


class Inbox:
    """`expect` a generation before it is submitted, `follow` it once it is known where; `take` its
    journal to read it, and `forget` it. A stream that breaks fails what it has not ended."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._reader = uuid.uuid4().hex
        self._journals: dict[str, Journal] = {}
        self._taken: set[str] = set()
        self._streams: dict[str, Stream] = {}  # by generation
        self._tasks: dict[Stream, asyncio.Task[None]] = {}

    def expect(self, request: GenerationRequest) -> str:
        """The name of the reader to submit it for."""
        self._journals[request.request_id] = Journal(request, math.inf)
        return self._reader

    def follow(self, request_id: str, stream: Stream) -> None:
        if request_id not in self._journals:
            return
        self._streams[request_id] = stream
        if stream not in self._tasks:
            # Not in the context of a request: Serve would cancel it with that one.
            self._tasks[stream] = asyncio.create_task(self._run(stream), context=Context())

    def take(self, request_id: str) -> Journal | None:
        """None of what is not expected, or was taken before."""
        if request_id in self._taken or request_id not in self._streams:
            return None
        self._taken.add(request_id)
        return self._journals[request_id]

    def forget(self, request_id: str) -> Stream | None:
        """Where it was followed. Idempotent."""
        self._journals.pop(request_id, None)
        self._taken.discard(request_id)
        return self._streams.pop(request_id, None)

    async def _run(self, stream: Stream) -> None:
        """As long as a generation is followed there: a stream ends where it has been idle."""
        try:
            while journals := self._followed(stream):
                async for events in self._follow(stream):
                    for event in events:
                        self._deliver(event)
                for journal in journals:
                    journal.fail(_lost(journal.request.request_id))
        except RouterError as error:
            self._break(stream, error)
        except BaseException:
            self._break(stream, BackendUnavailable("the engine cannot be read", retry_after_s=10))
            raise
        finally:
            del self._tasks[stream]

    def _deliver(self, event: TokenEvent) -> None:
        journal = self._journals.get(event.request_id)
        if journal is not None:
            journal.append(event)

    def _followed(self, stream: Stream) -> list[Journal]:
        """Those that have not ended."""
        journals = (self._journals[each] for each, at in self._streams.items() if at == stream)
        return [journal for journal in journals if not journal.has_ended]

    def _break(self, stream: Stream, error: RouterError) -> None:
        """The engine drops a reader whose stream broke; the next generations are another's."""
        self._reader = uuid.uuid4().hex
        for journal in self._followed(stream):
            journal.fail(error)


def _lost(request_id: str) -> RouterError:
    """Of a generation that had not ended when its stream did."""
    return NotFound(f"generation {request_id} is unknown here or has expired")
