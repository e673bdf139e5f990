"""Events of the Claude dialect to text events.

https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from collections.abc import Mapping
from typing import Any

from router.backends.wire_fields import count, mapping, text
from router.errors import BackendError
from router.events import Finished, Started, TextDelta, TextEvent
from router.generation import FinishReason, Usage

# What has no word in other dialects (tool_use, pause_turn, refusal) ended as its model wanted.
_REASONS = {
    "max_tokens": FinishReason.LENGTH,
    "stop_sequence": FinishReason.STOP_STRING,
    "model_context_window_exceeded": FinishReason.CONTEXT_WINDOW,
}
_CONTENT = frozenset({"content_block_delta", "content_block_stop", "message_delta", "message_stop"})
_DELTA_TEXTS = ("text", "partial_json", "thinking")


class AnthropicReader:
    """Usage is cumulative: the start's and the delta's are merged, later values win."""

    def __init__(self) -> None:
        self.has_content = False
        self.is_counted = False
        self.is_finished = False
        self.num_content_bytes = 0
        self.usage: Usage | None = None
        self.reason: FinishReason | None = None
        self._counts: dict[str, Any] = {}
        self._stop_sequence: str | None = None
        self._has_started = False

    def read(self, payload: dict[str, Any]) -> list[TextEvent]:
        kind = payload.get("type")
        self.has_content = self.has_content or kind in _CONTENT
        if kind == "message_start":
            self._merge(mapping(payload.get("message")).get("usage"))
            return self._start()
        if kind == "content_block_delta":
            return self._delta(mapping(payload.get("delta")))
        if kind == "message_delta":
            self._merge(payload.get("usage"))
            self.is_counted = self.usage is not None
            self._stopped(mapping(payload.get("delta")))
        if kind == "message_stop":
            return self.end()
        return []

    def end(self) -> list[TextEvent]:
        if self.is_finished:
            return []
        if not self.has_content:
            raise BackendError("the upstream ended its answer before any of it came")
        self.is_finished = True
        self.reason = self.reason or FinishReason.STOP_TOKEN
        usage = self.usage or Usage(0, 0, 0)
        return [*self._start(), Finished(self.reason, usage, self._stop_sequence)]

    def read_whole(self, payload: dict[str, Any]) -> None:
        if payload.get("type") != "message" or not isinstance(payload.get("content"), list):
            raise BackendError("expected a message from the upstream, got another object")
        self._merge(payload.get("usage"))
        self._stopped(payload)
        self.is_counted = self.usage is not None
        self.has_content = self.is_finished = True

    def _start(self) -> list[TextEvent]:
        if self._has_started:
            return []
        self._has_started = True
        usage = self.usage or Usage(0, 0, 0)
        return [Started(Usage(usage.prompt_tokens, usage.cached_tokens, 0))]

    def _delta(self, delta: Mapping[str, Any]) -> list[TextEvent]:
        said = "".join(text(delta.get(name)) for name in _DELTA_TEXTS)
        self.num_content_bytes += len(said.encode(errors="replace"))
        if delta.get("type") != "text_delta":
            return self._start()
        return [*self._start(), TextDelta(text(delta.get("text")))]

    def _stopped(self, fields: Mapping[str, Any]) -> None:
        stop_reason = text(fields.get("stop_reason"))
        if stop_reason:
            self.reason = _REASONS.get(stop_reason, FinishReason.STOP_TOKEN)
        if self.reason is FinishReason.STOP_STRING:
            self._stop_sequence = text(fields.get("stop_sequence")) or None

    def _merge(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self._counts |= {name: value for name, value in usage.items() if value is not None}
        cached = count(self._counts.get("cache_read_input_tokens"))
        created = count(self._counts.get("cache_creation_input_tokens"))
        details = mapping(self._counts.get("output_tokens_details"))
        self.usage = Usage(
            prompt_tokens=count(self._counts.get("input_tokens")) + created + cached,
            cached_tokens=cached,
            completion_tokens=count(self._counts.get("output_tokens")),
            reasoning_tokens=count(details.get("thinking_tokens")),
        )
