"""Bodies of the Claude dialect to what they mean.

What the dialect itself forbids is refused here; what only some models can do is noted
(`features.py`). Fields that change nothing about the text (metadata, service_tier, cache_control,
speed, effort, diagnostics, billing and fallback settings) are accepted. Texts of several blocks,
and of neighbouring turns of one role, are joined by a newline.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from router.capabilities import Capability, Features
from router.chat import ChatMessage, ChatRequest
from router.errors import InvalidRequest
from router.generation import Grammar
from router.protocols.anthropic.features import conversation_features, request_features
from router.protocols.anthropic.schema import (
    Conversation,
    CountTokensBody,
    Message,
    MessagesBody,
    TextBlock,
    Thinking,
    Tool,
    ToolChoice,
)
from router.protocols.anthropic.tool_turns import check_tool_turns
from router.protocols.base import (
    MIN_TOP_P,
    Problem,
    check_body,
    check_stop_size,
    schema_grammar,
)

SAMPLING_VERSION = "2023-06-01"
CURRENT_VERSION = "2026-10-21"
MIN_THINKING_TOKENS = 1024
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


def parse_messages(body: bytes, version: str) -> ChatRequest:
    """`version` is the anthropic-version header. Raises InvalidRequest."""
    _check_version(version)
    fields = check_body(MessagesBody, body, _refuse)
    _check_sampling(fields, version)
    features = _conversation(fields, version)
    request_features(fields, features)
    stops = fields.stop_sequences or []
    _check_stops(stops)
    return ChatRequest(
        model=fields.model,
        messages=_turns(fields),
        max_tokens=fields.max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_k=fields.top_k or None,
        top_p=1.0 if fields.top_p is None else max(fields.top_p, MIN_TOP_P),
        grammar=_grammar(fields),
        stop_strings=tuple(stops),
        stream=bool(fields.stream),
        features=features.in_order(),
    )


def parse_count_tokens(body: bytes, version: str) -> ChatRequest:
    """As `parse_messages`, so that what is counted is what would be generated from."""
    _check_version(version)
    fields = check_body(CountTokensBody, body, _refuse)
    features = _conversation(fields, version).in_order()
    return ChatRequest(fields.model, _turns(fields), max_tokens=None, features=features)


def _conversation(fields: Conversation, version: str) -> Features:
    """Checks it, and returns what it asks for."""
    _check_conversation(fields, version)
    features = conversation_features(fields)
    is_whole = fields.thread is None or fields.thread.get("type") != "continue"
    if features.has(Capability.TOOLS) and is_whole:
        check_tool_turns(fields.messages, _invalid)
    return features


def _refuse(problem: Problem) -> InvalidRequest:
    return _invalid(".".join(map(str, problem.path)), problem.message)


def _invalid(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {message}", param=param)


def _check_version(version: str) -> None:
    if version not in (SAMPLING_VERSION, CURRENT_VERSION):
        raise _invalid(
            "anthropic-version",
            f'expected "{SAMPLING_VERSION}" or "{CURRENT_VERSION}", got "{version}"',
        )


def _check_sampling(fields: MessagesBody, version: str) -> None:
    if version != CURRENT_VERSION:
        return
    for name in ("temperature", "top_p", "top_k"):
        if getattr(fields, name) is not None:
            raise _invalid(
                name,
                f"not part of anthropic-version {CURRENT_VERSION}; "
                f"drop it or send anthropic-version {SAMPLING_VERSION}",
            )


def _check_stops(stops: list[str]) -> None:
    for index, stop in enumerate(stops):
        if not stop.strip():
            raise _invalid(
                f"stop_sequences.{index}", "each stop sequence must contain non-whitespace"
            )
    check_stop_size(stops, "stop_sequences")


def _grammar(fields: MessagesBody) -> Grammar | None:
    """`output_format` is the older name."""
    config = fields.output_config.format if fields.output_config else None
    if config is not None and fields.output_format is not None:
        raise _invalid("output_format", "got output_config.format too; send only the latter")
    if config is not None:
        return schema_grammar(config.schema_, "output_config.format.schema")
    if fields.output_format is not None:
        return schema_grammar(fields.output_format.schema_, "output_format.schema")
    return None


def _check_conversation(fields: Conversation, version: str) -> None:
    _check_tools(fields.tools or [], fields.tool_choice)
    _check_thinking(fields.thinking)
    for index, message in enumerate(fields.messages):
        _check_message(message, f"messages.{index}", version)
    turns = (message.role for message in fields.messages if message.role != "system")
    if next(turns, None) != "user":
        raise _invalid("messages", 'the first message must use the "user" role')


def _check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    names = set[str]()
    for index, tool in enumerate(tools):
        if not tool.is_custom:
            continue
        if tool.name is None or not _TOOL_NAME.fullmatch(tool.name):
            raise _invalid(f"tools.{index}.name", f"expected a name like {_TOOL_NAME.pattern}")
        if tool.name in names:
            raise _invalid(f"tools.{index}.name", "tool names must be unique")
        if tool.input_schema is None or tool.input_schema.get("type") != "object":
            raise _invalid(f"tools.{index}.input_schema.type", "expected 'object'")
        names.add(tool.name)
    if choice is not None and choice.type == "tool" and not choice.name:
        raise _invalid("tool_choice.name", "Field required")


def _check_thinking(thinking: Thinking | None) -> None:
    if thinking is None or thinking.type != "enabled":
        return
    if thinking.budget_tokens is None or thinking.budget_tokens < MIN_THINKING_TOKENS:
        raise _invalid(
            "thinking.budget_tokens",
            f"expected at least {MIN_THINKING_TOKENS} with type enabled, "
            f"got {thinking.budget_tokens}",
        )


def _check_message(message: Message, path: str, version: str) -> None:
    if message.role != "system" and (message.clear_at or message.output_config):
        name = "clear_at" if message.clear_at else "output_config"
        raise _invalid(f"{path}.{name}", 'only permitted on messages of role "system"')
    if not message.content:
        raise _invalid(f"{path}.content", "messages must have non-empty content")
    if isinstance(message.content, str):
        return
    for index, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            if block.citations:
                _check_citations(message.role, f"{path}.content.{index}", version)
        elif (block.type, message.role, version) == ("document", "assistant", CURRENT_VERSION):
            raise _invalid(
                f"{path}.content.{index}",
                '"document" blocks are not permitted in assistant messages',
            )


def _check_citations(role: str, path: str, version: str) -> None:
    if role == "user" and version == CURRENT_VERSION:
        raise _invalid(f"{path}.citations", "not permitted on text blocks of user messages")


def _turns(fields: Conversation) -> tuple[ChatMessage, ...]:
    return tuple(_merge(_messages(fields)))


def _messages(fields: Conversation) -> Iterator[ChatMessage]:
    if fields.system is not None and fields.system != []:
        yield ChatMessage("system", _text(fields.system))
    for message in fields.messages:
        yield ChatMessage(message.role, _text(message.content))


def _text(content: str | Iterable[object]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _merge(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    role, texts = None, list[str]()
    for message in messages:
        if role is not None and message.role != role:
            yield ChatMessage(role, "\n".join(texts))
            texts = []
        role = message.role
        texts.append(message.text)
    if role is not None:
        yield ChatMessage(role, "\n".join(texts))
