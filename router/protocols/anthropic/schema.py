"""Bodies of POST /v1/messages and POST /v1/messages/count_tokens.

Every field of the public API is known by name, beta fields included. Of what only some backends
understand, no more is checked than what the router itself reads.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic.types import FailFast

from router.protocols.base import LIST_FORM, STRING_FORM, Fields, content_form

MAX_MESSAGES = 100_000


class CacheControl(Fields):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Fields):
    type: Literal["text"]
    text: Annotated[str, Field(min_length=1)]
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


ToolUseId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]+$")]


class ToolUseBlock(Fields):
    model_config = ConfigDict(extra="ignore")

    type: Literal["tool_use"]
    id: ToolUseId
    name: str
    input: dict[str, Any]


class ToolResultBlock(Fields):
    model_config = ConfigDict(extra="ignore")

    type: Literal["tool_result"]
    tool_use_id: ToolUseId


class OtherBlock(Fields):
    """A block whose fields are not looked at: its meaning is between client and backend."""

    model_config = ConfigDict(extra="ignore")

    type: Literal[
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "compaction",
        "container_upload",
        "document",
        "fallback",
        "image",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "search_result",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "thinking",
        "tool_addition",
        "tool_removal",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | OtherBlock, Field(discriminator="type")
]
SystemPrompt = Annotated[
    Annotated[str, Tag(STRING_FORM)] | Annotated[list[TextBlock], Tag(LIST_FORM)],
    Discriminator(content_form),
]
# Described here, checked in `parse`, in words that fit both forms.
Content = Annotated[
    Annotated[str, Field(json_schema_extra={"minLength": 1}), Tag(STRING_FORM)]
    | Annotated[list[Block], Field(json_schema_extra={"minItems": 1}), Tag(LIST_FORM)],
    Discriminator(content_form),
]


class Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: Content
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: "TurnOutputConfig | None" = None


class TurnOutputConfig(Fields):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    task_budget: dict[str, Any] | None = None


class JsonFormat(Fields):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(TurnOutputConfig):
    format: JsonFormat | None = None


class Metadata(Fields):
    user_id: str | None = None


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class Tool(Fields):
    """The caller's own when `type` is absent or `custom`, else one that the provider defines."""

    model_config = ConfigDict(extra="ignore")

    type: str | None = None
    name: str | None = None
    input_schema: dict[str, Any] | None = None

    @property
    def is_custom(self) -> bool:
        return self.type in (None, "custom")


class ToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ContextManagement(Fields):
    model_config = ConfigDict(extra="ignore")

    edits: list[dict[str, Any]] | None = None


class Conversation(Fields):
    """What both endpoints take."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    system: SystemPrompt | None = None
    billing_policy: Any = None
    cache_control: CacheControl | None = None
    compaction: dict[str, Any] | None = None
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    speed: Literal["standard", "fast"] | None = None
    thinking: Thinking | None = None
    thread: dict[str, Any] | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None


class CountTokensBody(Conversation):
    pass


class MessagesBody(Conversation):
    max_tokens: Annotated[int, Field(ge=0)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    container: Any = None
    diagnostics: dict[str, Any] | None = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: str | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
