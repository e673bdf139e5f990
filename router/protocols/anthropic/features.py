"""What a body of the Claude dialect asks for that not every model can do, each with the words in
which a model refuses that cannot. Local models have structured output alone."""

from router.capabilities import Capability, Feature, Features
from router.protocols.anthropic.schema import (
    Conversation,
    Message,
    MessagesBody,
    TextBlock,
    TurnOutputConfig,
)

BLOCK_CAPABILITIES = {
    "advisor_tool_result": Capability.PROVIDER_TOOLS,
    "bash_code_execution_tool_result": Capability.PROVIDER_TOOLS,
    "code_execution_tool_result": Capability.PROVIDER_TOOLS,
    "compaction": Capability.CONTEXT_MANAGEMENT,
    "container_upload": Capability.CODE_EXECUTION,
    "document": Capability.DOCUMENTS,
    "fallback": Capability.FALLBACKS,
    "image": Capability.IMAGES,
    "mcp_tool_listing": Capability.PROVIDER_TOOLS,
    "mcp_tool_result": Capability.PROVIDER_TOOLS,
    "mcp_tool_use": Capability.PROVIDER_TOOLS,
    "redacted_thinking": Capability.THINKING,
    "search_result": Capability.DOCUMENTS,
    "server_tool_use": Capability.PROVIDER_TOOLS,
    "text_editor_code_execution_tool_result": Capability.PROVIDER_TOOLS,
    "thinking": Capability.THINKING,
    "tool_addition": Capability.PROVIDER_TOOLS,
    "tool_removal": Capability.PROVIDER_TOOLS,
    "tool_result": Capability.TOOLS,
    "tool_search_tool_result": Capability.PROVIDER_TOOLS,
    "tool_use": Capability.TOOLS,
    "web_fetch_tool_result": Capability.PROVIDER_TOOLS,
    "web_search_tool_result": Capability.PROVIDER_TOOLS,
}


def conversation_features(fields: Conversation) -> Features:
    features = Features()
    _thread(fields, features)
    _tools(fields, features)
    _output_config(fields.output_config, "output_config", features)
    formats = {
        "output_config.format": fields.output_config and fields.output_config.format,
        "output_format": fields.output_format,
    }
    for param, output_format in formats.items():
        if output_format is not None:
            _add(
                features,
                Capability.STRUCTURED_OUTPUT,
                param,
                "this model has no structured output; drop it and ask for JSON in the prompt",
            )
    _thinking(fields, features)
    _context_management(fields, features)
    for index, message in enumerate(fields.messages):
        _message(message, index, features)
    if fields.messages[-1].role == "assistant":
        _add(
            features,
            Capability.PREFILL,
            "messages",
            "local models do not continue a partial assistant message (prefill); "
            'the last message must use the "user" role',
        )
    return features


def request_features(fields: MessagesBody, features: Features) -> None:
    """Adds what is not part of the conversation."""
    if fields.container is not None:
        _add(
            features,
            Capability.CODE_EXECUTION,
            "container",
            "local models run no code; drop container",
        )
    if fields.inference_geo not in (None, "global"):
        _add(
            features,
            Capability.INFERENCE_GEO,
            "inference_geo",
            "local models run where this cluster runs; drop inference_geo",
        )


def _add(features: Features, capability: Capability, param: str, message: str) -> None:
    features.add(Feature(capability, param, f"{param}: {message}"))


def _thread(fields: Conversation, features: Features) -> None:
    if fields.thread is None:
        return
    # The SDK's tool runner reads this code and sends the whole conversation instead. Ignoring
    # `thread` would lose the history: the next request carries only what is new.
    features.add(
        Feature(
            Capability.THREADS,
            "thread",
            "thread: local models keep no threads; send the full conversation without thread",
            details_code="thread_unsupported_request",
        )
    )


def _tools(fields: Conversation, features: Features) -> None:
    for tool in fields.tools or []:
        capability = Capability.TOOLS if tool.is_custom else Capability.PROVIDER_TOOLS
        _add(features, capability, "tools", "local models call no tools; drop tools")
    if fields.tool_choice is not None and fields.tool_choice.type != "none":
        _add(
            features,
            Capability.TOOLS,
            "tool_choice",
            "local models call no tools; drop tool_choice",
        )
    if fields.mcp_servers:
        _add(
            features,
            Capability.PROVIDER_TOOLS,
            "mcp_servers",
            "local models call no tools; drop mcp_servers",
        )


def _output_config(config: TurnOutputConfig | None, param: str, features: Features) -> None:
    if config is not None and config.task_budget is not None:
        _add(
            features,
            Capability.TASK_BUDGET,
            f"{param}.task_budget",
            "local models keep no task budget; drop it",
        )


def _thinking(fields: Conversation, features: Features) -> None:
    if fields.thinking is not None and fields.thinking.type != "disabled":
        _add(
            features,
            Capability.THINKING,
            "thinking.type",
            f'local models do not think aloud, got "{fields.thinking.type}"; '
            'drop thinking or send {"type": "disabled"}',
        )


def _context_management(fields: Conversation, features: Features) -> None:
    """Edits that clear tool results or thinking have nothing to clear in texts; others would
    change what the model reads."""
    if fields.compaction:
        _add(
            features,
            Capability.CONTEXT_MANAGEMENT,
            "compaction",
            "not available on local models; drop it",
        )
    edits = fields.context_management.edits if fields.context_management else None
    for index, edit in enumerate(edits or []):
        if not str(edit.get("type")).startswith("clear_"):
            _add(
                features,
                Capability.CONTEXT_MANAGEMENT,
                f"context_management.edits.{index}",
                "only clear_* edits are possible on local models; drop it",
            )


def _message(message: Message, index: int, features: Features) -> None:
    if message.clear_at == "next_user_message":
        _add(
            features,
            Capability.CONTEXT_MANAGEMENT,
            f"messages.{index}.clear_at",
            "local models clear no messages; drop clear_at",
        )
    _output_config(message.output_config, f"messages.{index}.output_config", features)
    if isinstance(message.content, str):
        return
    for number, block in enumerate(message.content):
        if not isinstance(block, TextBlock):
            _add(
                features,
                BLOCK_CAPABILITIES[block.type],
                f"messages.{index}.content.{number}",
                f'local models read text only, got a "{block.type}" block; drop it',
            )
