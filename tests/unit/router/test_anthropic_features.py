"""What a Claude body asks for beyond text, and the order of its tools."""

from typing import get_args

import pytest

from router.capabilities import Capability, check_features
from router.chat import ChatMessage
from router.errors import UnsupportedFeature
from router.protocols.anthropic.features import BLOCK_CAPABILITIES
from router.protocols.anthropic.parse import parse_messages
from router.protocols.anthropic.schema import OtherBlock
from tests.unit.router.claude_bodies import (
    NEW,
    OLD,
    TOOL,
    USER,
    assistant,
    body,
    feature,
    refusal,
    tool_result,
    tool_use,
    user,
)


@pytest.mark.parametrize(
    ("fields", "capability", "param"),
    [
        ({"tools": [TOOL]}, "tools", "tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "provider_tools", "tools"),
        ({"tool_choice": {"type": "auto"}}, "tools", "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "provider_tools", "mcp_servers"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking", "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking", "thinking.type"),
        ({"container": "c"}, "code_execution", "container"),
        ({"inference_geo": "eu"}, "inference_geo", "inference_geo"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "structured_output",
            "output_config.format",
        ),
        ({"output_config": {"task_budget": {}}}, "task_budget", "output_config.task_budget"),
        (
            {"output_format": {"type": "json_schema", "schema": {}}},
            "structured_output",
            "output_format",
        ),
        ({"compaction": {"trigger": 1}}, "context_management", "compaction"),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management",
            "context_management.edits.0",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "prefill", "messages"),
        ({"messages": user({"type": "image", "source": {}})}, "images", "messages.0.content.0"),
        ({"messages": user({"type": "document"})}, "documents", "messages.0.content.0"),
        (
            {"messages": [USER, assistant({"type": "thinking", "signature": "s"}), USER]},
            "thinking",
            "messages.1.content.0",
        ),
        (
            {"messages": [USER, assistant(tool_use()), *user(tool_result())]},
            "tools",
            "messages.1.content.0",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "x", "clear_at": "next_user_message"},
                    USER,
                ]
            },
            "context_management",
            "messages.0.clear_at",
        ),
    ],
)
@pytest.mark.parametrize("version", [OLD, NEW])
def test_what_not_every_model_can_do_is_noted_in_words_of_a_refusal(
    fields, capability, param, version
):
    noted = feature(body(**fields), version)
    assert (noted.capability, noted.param) == (capability, param)
    assert noted.message.startswith(f"{param}: ")
    assert "local models" in noted.message or "drop it" in noted.message
    check_features((noted,), frozenset({Capability(capability)}))
    with pytest.raises(UnsupportedFeature) as caught:
        check_features((noted,), frozenset(Capability) - {Capability(capability)})
    assert (caught.value.message, caught.value.param) == (noted.message, param)


def test_features_keep_their_order_and_the_first_use_of_each():
    blocks = [{"type": "image"}, {"type": "text", "text": "x"}, {"type": "image"}]
    raw = body(messages=user(*blocks), tools=[TOOL], container="c", system="s")
    chat = parse_messages(raw, NEW)
    assert [noted.param for noted in chat.features] == [
        "tools",
        "messages.0.content.0",
        "container",
    ]
    assert chat.messages == (ChatMessage("system", "s"), ChatMessage("user", "x"))
    with pytest.raises(UnsupportedFeature) as caught:
        check_features(chat.features, frozenset({Capability.TOOLS}))
    assert caught.value.param == "messages.0.content.0"


def test_every_block_of_the_dialect_has_a_capability():
    typed = {"tool_use", "tool_result"}
    assert set(get_args(OtherBlock.model_fields["type"].annotation)) | typed == set(
        BLOCK_CAPABILITIES
    )


def test_threads_are_refused_with_the_code_the_sdk_understands():
    noted = feature(body(thread={"type": "create"}), NEW)
    assert noted.details_code == "thread_unsupported_request"
    with pytest.raises(UnsupportedFeature) as caught:
        check_features((noted,), frozenset())
    assert caught.value.details_code == "thread_unsupported_request"


@pytest.mark.parametrize(
    "messages",
    [
        [USER, assistant(tool_use()), *user(tool_result(), {"type": "text", "text": "so?"})],
        [USER, assistant(tool_use("a"), tool_use("b")), *user(tool_result("b"), tool_result("a"))],
        [
            USER,
            assistant(tool_use("a")),
            assistant(tool_use("b")),
            *user(tool_result("a")),
            *user(tool_result("b")),
        ],
        [
            USER,
            assistant(tool_use()),
            {"role": "system", "content": "x"},
            *user(tool_result()),
        ],
    ],
)
def test_tools_in_order(messages):
    assert [
        noted.capability for noted in parse_messages(body(messages=messages), NEW).features
    ] == [Capability.TOOLS]


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        (user(tool_result()), "messages.0.content.0.tool_use_id", "got t1"),
        ([USER, assistant(tool_use()), USER], "messages.1.content.0", "tool_result for t1"),
        ([USER, assistant(tool_use())], "messages.1.content.0", "tool_result for t1"),
        (
            [
                USER,
                assistant(tool_use()),
                USER,
                assistant({"type": "text", "text": "x"}),
                *user(tool_result()),
            ],
            "messages.1.content.0",
            "tool_result for t1",
        ),
        (
            [USER, assistant(tool_use()), *user(tool_result(), tool_result())],
            "messages.2.content.1.tool_use_id",
            "unanswered",
        ),
        ([USER, assistant(tool_use(), tool_use())], "messages.1.content.1.id", "unique"),
        (user(tool_use()), "messages.0.content.0", "only permitted in assistant"),
        ([USER, assistant(tool_result()), USER], "messages.1.content.0", "only permitted in user"),
        (
            [USER, assistant({**tool_use(), "id": "a b"}), USER],
            "messages.1.content.0.tool_use.id",
            "pattern",
        ),
    ],
)
def test_tools_out_of_order_are_refused_for_every_model(messages, param, words):
    error = refusal(body(messages=messages), NEW)
    assert error.param == param
    assert words in error.message
    assert not isinstance(error, UnsupportedFeature)


def test_a_continued_thread_answers_tools_of_the_turns_it_left_out():
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    chat = parse_messages(body(messages=user(tool_result()), thread=thread), NEW)
    assert [noted.capability for noted in chat.features] == [Capability.THREADS, Capability.TOOLS]
