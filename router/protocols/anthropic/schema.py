"""Bodies of POST /v1/messages and POST /v1/messages/count_tokens.

Every field of the public API is known by name, beta fields included. A field whose meaning cannot
be had from a local model has the type of any JSON value: it is judged in `parse`, not here.
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


class OtherBlock(Fields):
    """Legal in the dialect, never on a local model; the fields are not looked at."""

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
        "tool_result",
        "tool_search_tool_result",
        "tool_use",
        "web_fetch_tool_result",
        "web_search_tool_result",
    ]


Block = Annotated[TextBlock | OtherBlock, Field(discriminator="type")]
SystemPrompt = Annotated[
    Annotated[str, Tag(STRING_FORM)] | Annotated[list[TextBlock], Tag(LIST_FORM)],
    Discriminator(content_form),
]
Content = Annotated[
    Annotated[str, Tag(STRING_FORM)] | Annotated[list[Block], Tag(LIST_FORM)],
    Discriminator(content_form),
]


class Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: Content
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: "OutputConfig | None" = None


class OutputConfig(Fields):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None
    task_budget: dict[str, Any] | None = None


class Metadata(Fields):
    user_id: str | None = None


class Thinking(Fields):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: str | None = None


class Conversation(Fields):
    """What both endpoints take."""

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    system: SystemPrompt | None = None
    billing_policy: Any = None
    cache_control: CacheControl | None = None
    compaction: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    speed: Literal["standard", "fast"] | None = None
    thinking: Thinking | None = None
    thread: dict[str, Any] | None = None
    tool_choice: dict[str, Any] | None = None
    tools: list[Any] | None = None


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
