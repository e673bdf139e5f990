"""The shapes of what the Claude dialect answers: for the API's description and for tests. `encode`
writes them without these classes, which would cost every answer a validation."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextContent(Answer):
    type: Literal["text"]
    text: str


class Usage(Answer):
    """The whole prompt is the sum of the three counts of input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: Usage


class TokenCount(Answer):
    input_tokens: int


class ModelCard(Answer):
    """`created_at` is an RFC 3339 time."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active", "deprecated", "retired"]
    deprecated_at: str | None
    retires_at: str | None
    line: str | None
    max_input_tokens: int
    max_tokens: int
    capabilities: dict[str, Any]


class ModelPage(Answer):
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ErrorDetails(Answer):
    error_code: str


class ErrorFields(Answer):
    """`details` only where there is a code for programs."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: str
    details: ErrorDetails | None = None


class ErrorAnswer(Answer):
    type: Literal["error"]
    error: ErrorFields
    request_id: str
