"""Text events to the OpenAI dialect: pure folds, so that any replica can repeat a stream."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, assert_never

from router.completion import Completion
from router.errors import BackendError, RouterError
from router.events import Finished, Started, TextDelta, TextEvent, TextLogprobs
from router.generation import FinishReason, Usage
from router.protocols.base import json_string
from router.sse.codec import ServerSentEvent

# JSON has no infinity; this is what the dialect writes for a probability of nothing.
MIN_LOGPROB = -9999.0

_DONE = ServerSentEvent("[DONE]")
_NO_TEXT = '"content":""'
_FINISH_REASONS = {
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT_WINDOW: "length",
}


class ChatCompletionStream:
    """The fold of `num_completions` completions, their events interleaved, into one stream of
    chunks."""

    def __init__(
        self,
        completion_id: str,
        model: str,
        created: int,
        num_completions: int,
        include_usage: bool,
    ) -> None:
        self._completion_id = completion_id
        self._model = model
        self._created = created
        self._num_completions = num_completions
        self._include_usage = include_usage
        self._usages: dict[int, Usage] = {}
        self._text_frames: dict[int, tuple[str, str]] = {}  # by choice: before and after a text

    def encode(self, choice_index: int, event: TextEvent) -> list[ServerSentEvent]:
        match event:
            case Started():
                return [self._delta(choice_index, {"role": "assistant", "content": ""})]
            case TextDelta(text="", logprobs=()):
                return []
            case TextDelta(text=text, logprobs=()):
                return [self._text(choice_index, text)]
            case TextDelta():
                return [self._delta(choice_index, {"content": event.text}, event.logprobs)]
            case Finished():
                return self._finish(choice_index, event)
            case _:
                assert_never(event)

    def error(self, error: RouterError) -> list[ServerSentEvent]:
        return [_event(error_body(error))]

    def _finish(self, choice_index: int, finished: Finished) -> list[ServerSentEvent]:
        if finished.reason is FinishReason.ABORT:
            return self.error(_aborted())
        self._usages[choice_index] = finished.usage
        reason = _FINISH_REASONS[finished.reason]
        events = [self._delta(choice_index, {}, finish_reason=reason)]
        if len(self._usages) < self._num_completions:
            return events
        if self._include_usage:
            events.append(self._chunk([], _usage(self._in_order())))
        events.append(_DONE)
        return events

    def _text(self, choice_index: int, text: str) -> ServerSentEvent:
        """As `_delta`, without writing anew what is the same for every token."""
        if choice_index not in self._text_frames:
            # No string of a model or an id can hold this: JSON would escape its quotes.
            before, _, after = self._delta(choice_index, {"content": ""}).data.partition(_NO_TEXT)
            self._text_frames[choice_index] = f"{before}{_NO_TEXT[:-2]}", after
        before, after = self._text_frames[choice_index]
        return ServerSentEvent(f"{before}{json_string(text)}{after}")

    def _in_order(self) -> list[Usage]:
        return [self._usages[choice_index] for choice_index in sorted(self._usages)]

    def _delta(
        self,
        choice_index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TextLogprobs] = (),
        finish_reason: str | None = None,
    ) -> ServerSentEvent:
        choice = {
            "index": choice_index,
            "delta": delta,
            "logprobs": _logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        return self._chunk([choice], None)

    def _chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> ServerSentEvent:
        chunk = {
            "id": self._completion_id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        if self._include_usage:
            chunk["usage"] = usage
        return _event(chunk)


def completion_body(
    completion_id: str, model: str, created: int, completions: Sequence[Completion]
) -> dict[str, Any]:
    """Raises BackendError for a completion that was aborted or never finished."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [_choice(index, completion) for index, completion in enumerate(completions)],
        "usage": _usage([completion.usage for completion in completions]),
    }


def error_body(error: RouterError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.param,
            "code": error.openai_code,
        }
    }


def model_body(model_id: str, created: int, owned_by: str) -> dict[str, Any]:
    """`created` in seconds since 1970."""
    return {"id": model_id, "object": "model", "created": created, "owned_by": owned_by}


def model_list_body(models: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": list(models)}


def _choice(index: int, completion: Completion) -> dict[str, Any]:
    if completion.reason is None or completion.reason is FinishReason.ABORT:
        raise _aborted()
    return {
        "index": index,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": _logprobs(completion.logprobs) if completion.logprobs else None,
        "finish_reason": _FINISH_REASONS[completion.reason],
    }


def _logprobs(logprobs: Iterable[TextLogprobs]) -> dict[str, Any]:
    content = [
        {
            **_token(one.token, one.token_bytes, one.logprob),
            "top_logprobs": [_token(*top) for top in one.top],
        }
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def _token(token: str, token_bytes: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token, "bytes": list(token_bytes), "logprob": max(logprob, MIN_LOGPROB)}


def _usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """All completions answer one prompt: it counts once, as the first of them met it."""
    prompt_tokens = usages[0].prompt_tokens
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
    }


def _aborted() -> BackendError:
    return BackendError("the generation was aborted before it ended; send the request again")


def _event(payload: dict[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(json.dumps(payload, ensure_ascii=False, separators=(",", ":")))
