"""Chunks of the OpenAI dialect to text events: of the first choice, the only one asked for when a
stream is translated."""

from collections.abc import Mapping
from typing import Any

from router.backends.wire_fields import count, first, mapping, text
from router.errors import BackendError
from router.events import Finished, Started, TextDelta, TextEvent
from router.generation import FinishReason, Usage

_NOT_STARTED = Usage(0, 0, 0)


class OpenAIReader:
    """Usage comes after the last choice, and only where it was asked for: the end is written when
    `[DONE]` or the end of the stream says that nothing follows."""

    def __init__(self) -> None:
        self.has_content = False
        self.is_counted = False
        self.is_finished = False
        self.num_content_bytes = 0
        self.usage: Usage | None = None
        self.reason: FinishReason | None = None
        self._has_started = False

    def read(self, payload: dict[str, Any]) -> list[TextEvent]:
        self._count(payload.get("usage"))
        said = ""
        for choice in _choices(payload):
            delta = mapping(choice.get("delta"))
            content = text(delta.get("content"))
            self._stopped(choice)
            self._saw(delta)
            if not choice.get("index"):
                said += content
        start = self._start() if payload.get("choices") else []
        return [*start, TextDelta(said)] if said else start

    def end(self) -> list[TextEvent]:
        if self.is_finished:
            return []
        if not self.has_content:
            raise BackendError("the upstream ended its answer before any of it came")
        self.is_finished = True
        self.reason = self.reason or FinishReason.STOP_TOKEN
        return [*self._start(), Finished(self.reason, self.usage or _NOT_STARTED)]

    def read_whole(self, payload: dict[str, Any]) -> None:
        if not isinstance(first(payload.get("choices")), dict):
            raise BackendError("expected a completion from the upstream, got another object")
        for choice in _choices(payload):
            self._saw(mapping(choice.get("message")))
            self._stopped(choice)
        self._count(payload.get("usage"))
        self.has_content = self.is_finished = True

    def _start(self) -> list[TextEvent]:
        if self._has_started:
            return []
        self._has_started = True
        return [Started(self.usage or _NOT_STARTED)]

    def _saw(self, delta: Mapping[str, Any]) -> None:
        content = text(delta.get("content")) + text(delta.get("reasoning_content"))
        self.num_content_bytes += len(content.encode(errors="replace"))
        others = (name for name in delta if name not in ("role", "content", "refusal"))
        self.has_content = self.has_content or bool(content) or any(map(delta.get, others))

    def _stopped(self, choice: Mapping[str, Any]) -> None:
        finish_reason = text(choice.get("finish_reason"))
        if finish_reason:
            is_cut = finish_reason == "length"
            self.reason = FinishReason.LENGTH if is_cut else FinishReason.STOP_TOKEN
            self.has_content = True

    def _count(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        prompt_details = mapping(usage.get("prompt_tokens_details"))
        completion_details = mapping(usage.get("completion_tokens_details"))
        self.is_counted = True
        self.usage = Usage(
            prompt_tokens=count(usage.get("prompt_tokens")),
            cached_tokens=count(prompt_details.get("cached_tokens")),
            completion_tokens=count(usage.get("completion_tokens")),
            reasoning_tokens=count(completion_details.get("reasoning_tokens")),
        )


def _choices(payload: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = payload.get("choices")
    return [mapping(choice) for choice in choices] if isinstance(choices, list) else []
