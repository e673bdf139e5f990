"""Bodies of the Claude dialect to what they mean for a local model.

Fields that change nothing a local model does (metadata, service_tier, cache_control, speed, effort,
diagnostics, billing and fallback settings) are accepted; those that ask for something it cannot do
are refused by name. Texts of several blocks, and of neighbouring turns of one role, are joined by a
newline.
"""

from collections.abc import Iterable, Iterator

from router.chat import ChatMessage, ChatRequest
from router.errors import InvalidRequest, UnsupportedFeature
from router.protocols.anthropic.schema import (
    Conversation,
    CountTokensBody,
    Message,
    MessagesBody,
    OutputConfig,
    TextBlock,
)
from router.protocols.base import MIN_TOP_P, Problem, check_body, check_stop_size

SAMPLING_VERSION = "2023-06-01"
CURRENT_VERSION = "2026-10-21"


def parse_messages(body: bytes, version: str) -> ChatRequest:
    """`version` is the anthropic-version header. Raises InvalidRequest, and UnsupportedFeature for
    what is legal in the dialect but not on a local model."""
    _check_version(version)
    fields = check_body(MessagesBody, body, _refuse)
    _check_sampling(fields, version)
    _check_conversation(fields, version)
    _check_request(fields)
    stops = fields.stop_sequences or []
    _check_stops(stops)
    return ChatRequest(
        model=fields.model,
        messages=_turns(fields),
        max_tokens=fields.max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_k=fields.top_k or None,
        top_p=1.0 if fields.top_p is None else max(fields.top_p, MIN_TOP_P),
        stop_strings=tuple(stops),
        stream=bool(fields.stream),
    )


def parse_count_tokens(body: bytes, version: str) -> ChatRequest:
    """As `parse_messages`, so that what is counted is what would be generated from."""
    _check_version(version)
    fields = check_body(CountTokensBody, body, _refuse)
    _check_conversation(fields, version)
    return ChatRequest(model=fields.model, messages=_turns(fields), max_tokens=None)


def _refuse(problem: Problem) -> InvalidRequest:
    return _invalid(".".join(map(str, problem.path)), problem.message)


def _invalid(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {message}", param=param)


def _unsupported(param: str, message: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"{param}: {message}", param=param)


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


def _check_conversation(fields: Conversation, version: str) -> None:
    _check_thread(fields)
    _check_tools(fields)
    _check_output_config(fields.output_config, "output_config")
    if fields.output_format:
        raise _unsupported("output_format", "local models have no structured output; drop it")
    if fields.thinking is not None and fields.thinking.type != "disabled":
        raise _unsupported(
            "thinking.type",
            f'local models do not think aloud, got "{fields.thinking.type}"; '
            'drop thinking or send {"type": "disabled"}',
        )
    if fields.compaction:
        raise _unsupported("compaction", "not available on local models; drop it")
    _check_context_management(fields)
    for index, message in enumerate(fields.messages):
        _check_message(message, f"messages.{index}", version)
    _check_order(fields.messages)


def _check_thread(fields: Conversation) -> None:
    if fields.thread is not None:
        # The SDK's tool runner reads this code and sends the whole conversation instead. Ignoring
        # `thread` would lose the history: the next request carries only what is new.
        raise UnsupportedFeature(
            "thread: local models keep no threads; send the full conversation without thread",
            param="thread",
            details_code="thread_unsupported_request",
        )


def _check_tools(fields: Conversation) -> None:
    if fields.tools:
        raise _unsupported("tools", "local models call no tools; drop tools")
    if fields.tool_choice is not None and fields.tool_choice.get("type") != "none":
        raise _unsupported("tool_choice", "local models call no tools; drop tool_choice")
    if fields.mcp_servers:
        raise _unsupported("mcp_servers", "local models call no tools; drop mcp_servers")


def _check_output_config(config: OutputConfig | None, param: str) -> None:
    if config is None:
        return
    if config.format is not None:
        raise _unsupported(
            f"{param}.format", "local models have no structured output; ask for JSON in the prompt"
        )
    if config.task_budget is not None:
        raise _unsupported(f"{param}.task_budget", "local models keep no task budget; drop it")


def _check_context_management(fields: Conversation) -> None:
    """Edits that clear tool results or thinking have nothing to clear here; others would change
    what the model reads."""
    edits = (fields.context_management or {}).get("edits") or []
    for index, edit in enumerate(edits):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str) or not kind.startswith("clear_"):
            raise _unsupported(
                f"context_management.edits.{index}",
                "only clear_* edits are possible on local models; drop it",
            )


def _check_request(fields: MessagesBody) -> None:
    if fields.container is not None:
        raise _unsupported("container", "local models run no code; drop container")
    if fields.inference_geo not in (None, "global"):
        raise _unsupported(
            "inference_geo", "local models run where this cluster runs; drop inference_geo"
        )


def _check_message(message: Message, path: str, version: str) -> None:
    if message.role != "system" and (message.clear_at or message.output_config):
        name = "clear_at" if message.clear_at else "output_config"
        raise _invalid(f"{path}.{name}", 'only permitted on messages of role "system"')
    if message.clear_at == "next_user_message":
        raise _unsupported(f"{path}.clear_at", "local models clear no messages; drop clear_at")
    _check_output_config(message.output_config, f"{path}.output_config")
    if not message.content:
        raise _invalid(f"{path}.content", "messages must have non-empty content")
    if isinstance(message.content, str):
        return
    for index, block in enumerate(message.content):
        block_path = f"{path}.content.{index}"
        if isinstance(block, TextBlock):
            _check_citations(block, message.role, block_path, version)
        elif (block.type, message.role, version) == ("document", "assistant", CURRENT_VERSION):
            raise _invalid(block_path, '"document" blocks are not permitted in assistant messages')
        else:
            raise _unsupported(
                block_path, f'local models read text only, got a "{block.type}" block; drop it'
            )


def _check_citations(block: TextBlock, role: str, path: str, version: str) -> None:
    if block.citations and role == "user" and version == CURRENT_VERSION:
        raise _invalid(f"{path}.citations", "not permitted on text blocks of user messages")


def _check_order(messages: list[Message]) -> None:
    roles = [message.role for message in messages]
    turns = [role for role in roles if role != "system"]
    if not turns or turns[0] != "user":
        raise _invalid("messages", 'the first message must use the "user" role')
    if roles[-1] == "assistant":
        raise _invalid(
            "messages",
            "local models do not continue a partial assistant message (prefill); "
            'the last message must use the "user" role',
        )


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
