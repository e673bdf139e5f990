"""One request of a client in its dialect: what it means, and how it wants to be answered."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from router.backends.json_spans import RequestBody
from router.backends.upstream import Wire
from router.chat import ChatRequest
from router.completion import Completion
from router.errors import RouterError
from router.protocols.anthropic import encode as anthropic
from router.protocols.anthropic.parse import parse_count_tokens, parse_messages
from router.protocols.base import StreamEncoder
from router.protocols.openai import encode as openai
from router.protocols.openai.parse import parse_chat
from router.sse.codec import encode_event


class ClientCall(Protocol):
    """`body` and `chat` are read when first asked for, and raise InvalidRequest: a body that goes
    to a server of its own dialect is never parsed further than `body` does."""

    @property
    def wire(self) -> Wire: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def query(self) -> str: ...

    @property
    def body(self) -> RequestBody: ...

    @property
    def chat(self) -> ChatRequest: ...

    def encoder(self) -> StreamEncoder: ...

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Raises BackendError for a completion that was aborted or never finished."""
        ...

    def error_frame(self, error: RouterError) -> bytes: ...


@dataclass(frozen=True)
class _Call:
    """`headers` have their names in lower case."""

    request_id: str
    content: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    query: str = ""

    @cached_property
    def body(self) -> RequestBody:
        return RequestBody(self.content)


@dataclass(frozen=True)
class ClaudeCall(_Call):
    version: str = ""
    is_count: bool = False
    wire: Wire = "anthropic"

    @cached_property
    def chat(self) -> ChatRequest:
        parse = parse_count_tokens if self.is_count else parse_messages
        return parse(self.content, self.version)

    @property
    def _message_id(self) -> str:
        return self.request_id.replace("req_", "msg_", 1)

    def encoder(self) -> StreamEncoder:
        return anthropic.MessageStream(self._message_id, self.chat.model)

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return anthropic.message_body(self._message_id, self.chat.model, completions[0])

    def error_frame(self, error: RouterError) -> bytes:
        return _frame(anthropic.MessageStream(self._message_id, ""), error)


@dataclass(frozen=True)
class OpenAICall(_Call):
    wire: Wire = "openai"
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def chat(self) -> ChatRequest:
        return parse_chat(self.content)

    @property
    def _completion_id(self) -> str:
        return self.request_id.replace("req_", "chatcmpl-", 1)

    def encoder(self) -> StreamEncoder:
        chat = self.chat
        return openai.ChatCompletionStream(
            self._completion_id, chat.model, self.created, chat.num_completions, chat.include_usage
        )

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return openai.completion_body(
            self._completion_id, self.chat.model, self.created, completions
        )

    def error_frame(self, error: RouterError) -> bytes:
        encoder = openai.ChatCompletionStream(self._completion_id, "", self.created, 1, False)
        return _frame(encoder, error)


def _frame(encoder: StreamEncoder, error: RouterError) -> bytes:
    return b"".join(map(encode_event, encoder.error(error)))
