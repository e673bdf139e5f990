"""A request in one dialect as the body of the other's. Text only: what the other dialect cannot be
told is refused, never dropped."""

import json
from collections.abc import Sequence
from typing import Any

from router.backends.upstream import Wire
from router.capabilities import Feature
from router.chat import ChatMessage, ChatRequest
from router.errors import (
    InvalidRequest,
    NotFound,
    RequestTooLarge,
    RouterError,
    UnsupportedFeature,
    UpstreamRefusal,
)
from router.protocols.base import MIN_TOP_P

# Claude wants a limit where the other dialect has none.
DEFAULT_MAX_TOKENS = 4096
# The version that still takes sampling parameters.
ANTHROPIC_VERSION = "2023-06-01"

_NEUTRAL = ChatRequest(model="", messages=(), max_tokens=None)
_CLAUDE_LACKS = (
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "num_logprobs",
    "presence_penalty",
    "repetition_penalty",
)
_OPENAI_LACKS = ("ignore_eos", "min_p", "repetition_penalty", "top_k")
_REQUEST_NAMES = {"num_logprobs": "logprobs", "num_completions": "n"}


def translated_body(chat: ChatRequest, model: str, wire: Wire) -> bytes:
    """Always asks for a stream, with usage. Raises UnsupportedFeature."""
    _check_features(chat.features, chat.model)
    body = _claude_body(chat) if wire == "anthropic" else _openai_body(chat)
    return json.dumps({"model": model, **body, "stream": True}, ensure_ascii=False).encode()


def translated_refusal(refusal: UpstreamRefusal) -> RouterError:
    """The same refusal for a client of the other dialect."""
    if refusal.upstream_status == 404:
        return NotFound(refusal.message)
    if refusal.upstream_status == 413:
        return RequestTooLarge(refusal.message)
    return InvalidRequest(refusal.message)


def _check_features(features: Sequence[Feature], model: str) -> None:
    for feature in features:
        raise UnsupportedFeature(
            f"{feature.param}: {feature.capability} is not translated between dialects; drop it, "
            f"or ask {model} in the dialect of its backend",
            param=feature.param,
            details_code=feature.details_code,
        )


def _check_settings(chat: ChatRequest, missing: Sequence[str]) -> None:
    for name in missing:
        if getattr(chat, name) != getattr(_NEUTRAL, name):
            raise _lacking(_REQUEST_NAMES.get(name, name))


def _lacking(param: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"{param}: the dialect of this model's backend does not have it; drop it", param=param
    )


def _claude_body(chat: ChatRequest) -> dict[str, Any]:
    _check_settings(chat, (*_CLAUDE_LACKS, "num_completions"))
    if chat.temperature > 1:
        raise _lacking("temperature above 1")
    num_leading = next(
        (i for i, turn in enumerate(chat.messages) if turn.role != "system"), len(chat.messages)
    )
    leading, rest = chat.messages[:num_leading], chat.messages[num_leading:]
    if any(turn.role == "system" for turn in rest):
        raise _lacking("messages: a system message after the first user message")
    body: dict[str, Any] = {
        "max_tokens": DEFAULT_MAX_TOKENS if chat.max_tokens is None else chat.max_tokens,
        "messages": _turns(rest),
    }
    if leading:
        body["system"] = "\n".join(turn.text for turn in leading)
    if chat.stop_strings:
        body["stop_sequences"] = list(chat.stop_strings)
    return body | _sampling(chat) | ({"top_k": chat.top_k} if chat.top_k else {})


def _openai_body(chat: ChatRequest) -> dict[str, Any]:
    _check_settings(chat, _OPENAI_LACKS)
    body: dict[str, Any] = {
        "messages": _turns(chat.messages),
        "stream_options": {"include_usage": True},
    }
    if chat.max_tokens is not None:
        body["max_tokens"] = chat.max_tokens
    if chat.stop_strings:
        body["stop"] = list(chat.stop_strings)
    return body | _sampling(chat)


def _turns(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.text} for turn in messages]


def _sampling(chat: ChatRequest) -> dict[str, Any]:
    """What differs from the default, which both dialects share. Newer models take none at all."""
    sampling: dict[str, Any] = {}
    if chat.temperature != _NEUTRAL.temperature:
        sampling["temperature"] = chat.temperature
    if chat.top_p != _NEUTRAL.top_p:
        sampling["top_p"] = 0.0 if chat.top_p == MIN_TOP_P else chat.top_p
    return sampling
