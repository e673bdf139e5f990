"""The body of POST /v1/chat/completions.

Every field of the public API is known by name, and five extras of other open servers (`top_k`,
`min_p`, `repetition_penalty`, `structured_outputs`, `ignore_eos`). Of what only some backends
understand, no more is checked than what the router itself reads.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic.types import FailFast

from router.protocols.base import LIST_FORM, STRING_FORM, Fields, content_form

MAX_CHOICES = 8
MAX_LOGIT_BIASES = 1024
MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20


class TextPart(Fields):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = None


class OtherPart(Fields):
    """A part whose fields are not looked at: its meaning is between client and backend."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["image_url", "input_audio", "file", "refusal"]


Part = Annotated[TextPart | OtherPart, Field(discriminator="type")]
Content = Annotated[
    Annotated[str, Tag(STRING_FORM)] | Annotated[list[Part], Field(min_length=1), Tag(LIST_FORM)],
    Discriminator(content_form),
]


class ToolCall(Fields):
    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function", "custom"]


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None
    refusal: str | None = None
    annotations: Any = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None


class Function(Fields):
    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    parameters: dict[str, Any] | None = None


class FunctionTool(Fields):
    type: Literal["function"]
    function: Function


class CustomTool(Fields):
    type: Literal["custom"]
    custom: dict[str, Any]


Tool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Fields):
    """Always enforced: `strict` has no effect, `name` and `description` reach no model."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    regex: Annotated[str, Field(min_length=1)]


TokenLimit = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class ChatBody(Fields):
    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    logprobs: bool | None = None
    max_completion_tokens: TokenLimit | None = None
    max_tokens: TokenLimit | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    response_format: ResponseFormat | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            Annotated[str, Tag(STRING_FORM)]
            | Annotated[list[str], Field(max_length=MAX_STOPS), Tag(LIST_FORM)],
            Discriminator(content_form),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None

    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    audio: Any = None
    function_call: Any = None
    functions: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    moderation: Any = None
    prediction: Any = None
    store: bool | None = None
    tool_choice: Any = None
    tools: list[Tool] | None = None
    web_search_options: Any = None
