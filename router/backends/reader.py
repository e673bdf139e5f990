"""What a router learns from an upstream's events: text, usage, how it ended. One reader for each
dialect; a client gets what it made of them, or the bytes themselves."""

import json
from typing import Any, Protocol

from router.backends.anthropic_reader import AnthropicReader
from router.backends.openai_reader import OpenAIReader
from router.backends.upstream import Wire, error_of
from router.errors import BackendError, RouterError
from router.events import TextEvent
from router.generation import FinishReason, Usage
from router.sse.codec import ServerSentEvent

BYTES_PER_TOKEN = 4


class StreamReader(Protocol):
    """`has_content`: something that a client would miss has come. `usage` is what was reported so
    far, None before anything was; it is final once `is_counted`."""

    has_content: bool
    is_counted: bool
    is_finished: bool
    num_content_bytes: int
    usage: Usage | None
    reason: FinishReason | None

    def read(self, payload: dict[str, Any]) -> list[TextEvent]: ...

    def end(self) -> list[TextEvent]:
        """The events that a stream owes which ended in order but without its last words."""
        ...

    def read_whole(self, payload: dict[str, Any]) -> None:
        """An answer that came as one body. Raises BackendError for what is none."""
        ...


def reader_of(protocol: Wire) -> StreamReader:
    return AnthropicReader() if protocol == "anthropic" else OpenAIReader()


class EventReader:
    """Events in, text events out. `error` is set once the upstream said that it failed."""

    def __init__(self, protocol: Wire) -> None:
        self.fold = reader_of(protocol)
        self.error: RouterError | None = None

    def read(self, event: ServerSentEvent) -> list[TextEvent]:
        """Raises BackendError for what no server of this dialect would say."""
        if event.data == "[DONE]":
            return self.fold.end()
        payload = json_object(event.data)
        self.error = self.error or error_of(payload)
        return [] if self.error else self.fold.read(payload)


def json_object(text: str | bytes) -> dict[str, Any]:
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        payload = None
    if not isinstance(payload, dict):
        # Not quoted: it may be a part of an answer.
        raise BackendError("expected a JSON object from the upstream, got something else")
    return payload
