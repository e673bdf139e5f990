"""The shapes of what the OpenAI dialect answers: for the API's description and for tests. `encode`
writes them without these classes, which would cost every answer a validation."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None


class TokenLogprob(Answer):
    token: str
    bytes: list[int]
    logprob: float


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChoiceLogprobs(Answer):
    content: list[ChosenLogprob]
    refusal: None


class Choice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length"]


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    """`prompt_tokens` include the cached ones."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatCompletion(Answer):
    """`created` in seconds since 1970."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class ErrorFields(Answer):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorFields
