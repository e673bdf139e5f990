"""Text events to the Claude dialect: pure folds, so that any replica can repeat a stream."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, assert_never

from router.capabilities import Capability
from router.completion import Completion
from router.errors import BackendError, InvalidRequest, RouterError
from router.events import Finished, Started, TextDelta, TextEvent
from router.generation import FinishReason, Usage
from router.protocols.base import json_string
from router.sse.codec import ServerSentEvent

MAX_PAGE_SIZE = 1000
DEFAULT_PAGE_SIZE = 20

_TEXT_DELTA = '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%s}}'
_STOP_REASONS = {
    FinishReason.STOP_TOKEN: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CONTEXT_WINDOW: "model_context_window_exceeded",
}


class MessageStream:
    """The fold of one completion into the events of a streamed message.

    https://docs.anthropic.com/en/docs/build-with-claude/streaming
    """

    def __init__(self, message_id: str, model: str) -> None:
        self._message_id = message_id
        self._model = model
        self._has_open_block = False

    def encode(self, choice_index: int, event: TextEvent) -> list[ServerSentEvent]:
        """`choice_index` is always 0: the dialect has one completion per request."""
        match event:
            case Started():
                return self._start(event.usage)
            case TextDelta():
                return self._text(event.text)
            case Finished():
                return self._finish(event)
            case _:
                assert_never(event)

    def error(self, error: RouterError) -> list[ServerSentEvent]:
        return [_event("error", **_error_fields(error))]

    def _start(self, usage: Usage) -> list[ServerSentEvent]:
        message = _message(self._message_id, self._model, [], None, None, usage)
        return [_event("message_start", message=message), _event("ping")]

    def _text(self, text: str) -> list[ServerSentEvent]:
        if not text:
            return []
        events = []
        if not self._has_open_block:
            self._has_open_block = True
            block = {"type": "text", "text": ""}
            events.append(_event("content_block_start", index=0, content_block=block))
        events.append(ServerSentEvent(_TEXT_DELTA % json_string(text), "content_block_delta"))
        return events

    def _finish(self, finished: Finished) -> list[ServerSentEvent]:
        if finished.reason is FinishReason.ABORT:
            return self.error(_aborted())
        events = [_event("content_block_stop", index=0)] if self._has_open_block else []
        delta = {
            "stop_reason": _STOP_REASONS[finished.reason],
            "stop_sequence": finished.stop_string,
        }
        events.append(_event("message_delta", delta=delta, usage=_usage(finished.usage)))
        events.append(_event("message_stop"))
        return events


def message_body(message_id: str, model: str, completion: Completion) -> dict[str, Any]:
    """Raises BackendError for a completion that was aborted or never finished."""
    if completion.reason is None or completion.reason is FinishReason.ABORT:
        raise _aborted()
    content = [{"type": "text", "text": completion.text}] if completion.text else []
    reason = _STOP_REASONS[completion.reason]
    return _message(message_id, model, content, reason, completion.stop_string, completion.usage)


def count_tokens_body(num_input_tokens: int) -> dict[str, Any]:
    return {"input_tokens": num_input_tokens}


def error_body(error: RouterError, request_id: str) -> dict[str, Any]:
    return {"type": "error", **_error_fields(error), "request_id": request_id}


def model_body(
    model_id: str,
    display_name: str,
    created_at: datetime,
    max_input_tokens: int,
    max_tokens: int,
    capabilities: frozenset[Capability] = frozenset(),
) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model_id,
        "display_name": display_name,
        "created_at": created_at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": max_input_tokens,
        "max_tokens": max_tokens,
        "capabilities": _model_capabilities(capabilities),
    }


def _model_capabilities(capabilities: frozenset[Capability]) -> dict[str, Any]:
    def support(capability: Capability) -> dict[str, Any]:
        return {"supported": capability in capabilities}

    thinking = support(Capability.THINKING)
    kinds = ("adaptive", "between_tools", "disabled", "enabled")
    levels = ("low", "medium", "high", "xhigh", "max")
    return {
        "batch": {"supported": False},
        "citations": support(Capability.DOCUMENTS),
        "code_execution": support(Capability.CODE_EXECUTION),
        "context_management": support(Capability.CONTEXT_MANAGEMENT),
        "effort": {"supported": False, **{level: {"supported": False} for level in levels}},
        "image_input": support(Capability.IMAGES),
        "pdf_input": support(Capability.DOCUMENTS),
        "server_tools": {
            **support(Capability.PROVIDER_TOOLS),
            "code_execution": support(Capability.CODE_EXECUTION),
            "web_search": support(Capability.PROVIDER_TOOLS),
        },
        "structured_outputs": support(Capability.STRUCTURED_OUTPUT),
        "thinking": {**thinking, "types": dict.fromkeys(kinds, thinking)},
    }


def model_list_body(
    models: Sequence[dict[str, Any]],
    limit: int = DEFAULT_PAGE_SIZE,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """One page of the `model_body`s between `after_id` and `before_id`: its first `limit`, or its
    last when only `before_id` is given. `has_more` looks in the direction of travel. Raises
    InvalidRequest."""
    if not 1 <= limit <= MAX_PAGE_SIZE:
        raise InvalidRequest(
            f"limit: expected 1 to {MAX_PAGE_SIZE}, got {limit}; ask for less", param="limit"
        )
    start = 0 if after_id is None else _position(models, after_id, "after_id") + 1
    end = len(models) if before_id is None else _position(models, before_id, "before_id")
    rest = models[start:end]
    page = rest[-limit:] if after_id is None and before_id is not None else rest[:limit]
    return {
        "data": list(page),
        "has_more": len(rest) > len(page),
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _position(models: Sequence[dict[str, Any]], model_id: str, param: str) -> int:
    for position, model in enumerate(models):
        if model["id"] == model_id:
            return position
    raise InvalidRequest(
        f"{param}: expected the id of a listed model, got {model_id!r}", param=param
    )


def _message(
    message_id: str,
    model: str,
    content: list[dict[str, Any]],
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: Usage,
) -> dict[str, Any]:
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": _usage(usage),
    }


def _usage(usage: Usage) -> dict[str, int]:
    """In this dialect `input_tokens` leaves out what came from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _error_fields(error: RouterError) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": error.anthropic_type, "message": error.message}
    if error.details_code is not None:
        fields["details"] = {"error_code": error.details_code}
    return {"error": fields}


def _aborted() -> BackendError:
    return BackendError("the generation was aborted before it ended; send the request again")


def _event(kind: str, **fields: Any) -> ServerSentEvent:
    payload = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return ServerSentEvent(payload, event=kind)
