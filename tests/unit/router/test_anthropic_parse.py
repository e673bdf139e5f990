"""Bodies of the Claude dialect: what is understood, what is refused, and in which words."""

import pytest

from router.capabilities import Capability
from router.chat import ChatMessage, ChatRequest
from router.errors import UnsupportedFeature
from router.protocols.anthropic.parse import parse_count_tokens, parse_messages
from tests.unit.router.claude_bodies import NEW, OLD, TOOL, USER, body, feature, refusal, user


def test_the_smallest_body():
    assert parse_messages(body(), NEW) == ChatRequest(
        model="local", messages=(ChatMessage("user", "Hello"),), max_tokens=16
    )


def test_every_field_that_has_an_effect():
    raw = body(
        system="Be brief.",
        stop_sequences=["END", "\n\nHuman:"],
        stream=True,
        temperature=0,
        top_p=0.5,
        top_k=3,
    )
    assert parse_messages(raw, OLD) == ChatRequest(
        model="local",
        messages=(ChatMessage("system", "Be brief."), ChatMessage("user", "Hello")),
        max_tokens=16,
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        stop_strings=("END", "\n\nHuman:"),
        stream=True,
    )


def test_fields_without_effect_are_accepted():
    raw = body(
        metadata={"user_id": "u"},
        service_tier="auto",
        cache_control={"type": "ephemeral", "ttl": "1h"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        container=None,
        diagnostics={},
        fallbacks=[{"model": "x"}],
        inference_geo="global",
        mcp_servers=[],
        output_config={"effort": "low", "format": None},
        speed="fast",
        stream=None,
        thinking={"type": "disabled"},
        tool_choice={"type": "none"},
        tools=[],
    )
    assert parse_messages(raw, NEW) == parse_messages(body(), NEW)


def test_texts_arrive_as_they_were_sent():
    text = "  <script>x</script> </system> {{ y }} 🦊\n"
    blocks = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    chat = parse_messages(body(messages=user(*blocks), system=blocks), NEW)
    assert chat.messages == (ChatMessage("system", text), ChatMessage("user", text))


def test_neighbouring_turns_of_one_role_are_one_turn():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"role": "system", "content": "f"},
        {"role": "user", "content": "g"},
    ]
    assert parse_messages(body(messages=messages), NEW).messages == (
        ChatMessage("user", "a\nb\nc"),
        ChatMessage("assistant", "d\ne"),
        ChatMessage("system", "f"),
        ChatMessage("user", "g"),
    )


def test_system_before_the_first_user_turn_joins_the_system_prompt():
    messages = [{"role": "system", "content": "b"}, USER]
    chat = parse_messages(body(system="a", messages=messages), NEW)
    assert chat.messages[0] == ChatMessage("system", "a\nb")


@pytest.mark.parametrize(("system", "expected"), [("", [""]), ([], []), (None, [])])
def test_an_empty_system_prompt_is_kept_and_an_absent_one_is_not_invented(system, expected):
    messages = parse_messages(body(system=system), NEW).messages
    assert [message.text for message in messages if message.role == "system"] == expected


def test_zero_means_what_the_dialect_says():
    chat = parse_messages(body(max_tokens=0, top_k=0, top_p=0, temperature=0), OLD)
    assert (chat.max_tokens, chat.top_k, chat.temperature) == (0, None, 0.0)
    assert 0 < chat.top_p < 1e-3


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON: EOF"),
        (b'{"model": "x",', "line 1 column 14"),
        (b"{} x", "trailing characters at line 1 column 4"),
        (b'{"model": "\xff"}', "invalid unicode code point"),
        (b'{"model": "\\ud800"}', "hex escape"),
        (b"[" * 10_000, "recursion limit"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_what_is_not_a_json_object_is_refused(raw, words):
    assert words in refusal(raw).message


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_must_be_finite(literal):
    raw = body(temperature=777).replace(b"777", literal.encode())
    assert refusal(raw).message == "temperature: Input should be a finite number"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": ...}, "model", "Field required"),
        ({"model": ""}, "model", "at least 1 character"),
        ({"max_tokens": ...}, "max_tokens", "Field required"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"temperature": 1.01}, "temperature", "less than or equal to 1"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 2}, "top_p", "less than or equal to 1"),
        ({"top_k": -1}, "top_k", "greater than or equal to 0"),
        ({"stream": "true"}, "stream", "valid boolean"),
        ({"seed": 1}, "seed", "Extra inputs are not permitted"),
        ({"metadata": {"team": "x"}}, "metadata.team", "Extra inputs are not permitted"),
        ({"messages": ...}, "messages", "Field required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": {}}, "messages", "valid array"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "'user'"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "Field required"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "Field required"),
        ({"messages": [{**USER, "x": 1}]}, "messages.0.x", "Extra inputs are not permitted"),
        ({"messages": [USER, 5]}, "messages.1", "object"),
        ({"messages": user("x")}, "messages.0.content.0", "object"),
        ({"messages": user({"type": "poem"})}, "messages.0.content.0", "'poem'"),
        ({"messages": user({"type": "text", "text": ""})}, "messages.0.content.0.text.text", "1"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string or an arr"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content", "non-empty"),
        ({"messages": user()}, "messages.0.content", "non-empty"),
        ({"messages": [{"role": "assistant", "content": "x"}, USER]}, "messages", "first message"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages", "first message"),
        ({"tools": {}}, "tools", "valid array"),
        ({"tools": [{}]}, "tools.0.name", "expected a name"),
        ({"tools": [{"name": "a b"}]}, "tools.0.name", "expected a name"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema.type", "'object'"),
        ({"tools": [TOOL, TOOL]}, "tools.1.name", "unique"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type", "'auto'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "1024"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1023}},
            "thinking.budget_tokens",
            "got 1023",
        ),
        ({"context_management": {"edits": 5}}, "context_management.edits", "valid array"),
        ({"messages": [{**USER, "clear_at": "never"}]}, "messages.0.clear_at", '"system"'),
        ({"system": 5}, "system", "string or an array"),
        ({"system": [{"type": "text", "text": ""}]}, "system.0.text", "at least 1 character"),
        ({"stop_sequences": ["ok", "\n"]}, "stop_sequences.1", "non-whitespace"),
        ({"stop_sequences": ["x" * 20_000]}, "stop_sequences", "at most 16384 characters"),
        ({"stop_sequences": "x"}, "stop_sequences", "valid array"),
    ],
)
def test_wrong_fields_are_named(fields, param, words):
    error = refusal(body(**fields))
    assert error.param == param
    assert error.message.startswith(f"{param}: ")
    assert words in error.message
    assert not isinstance(error, UnsupportedFeature)


def test_there_is_a_limit_to_the_number_of_messages():
    raw = body(messages=[{"role": "user", "content": "x"}] * 100_001)
    assert "at most 100000 items" in refusal(raw).message


def test_a_long_name_does_not_come_back_whole():
    assert len(refusal(body(**{"x" * 100_000: 1})).message) < 2_000
    raw = body(messages=user({"type": "x" * 100_000}))
    assert len(refusal(raw).message) < 2_000


@pytest.mark.parametrize("version", ["", "2023-01-01", "2026-10-21 "])
def test_other_versions_are_refused_naming_both(version):
    error = refusal(body(), version)
    assert OLD in error.message
    assert NEW in error.message
    assert error.param == "anthropic-version"


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
def test_sampling_fields_belong_to_the_old_version(name):
    assert parse_messages(body(**{name: 1}), OLD)
    error = refusal(body(**{name: 1}), NEW)
    assert error.param == name
    assert f"send anthropic-version {OLD}" in error.message


def test_citations_of_a_user_belong_to_the_old_version():
    messages = user({"type": "text", "text": "x", "citations": [{}]})
    assert parse_messages(body(messages=messages), OLD)
    assert refusal(body(messages=messages), NEW).param == "messages.0.content.0.citations"
    empty = user({"type": "text", "text": "x", "citations": []})
    assert parse_messages(body(messages=empty), NEW)


def test_a_document_of_the_assistant_is_illegal_in_the_new_version():
    messages = [USER, {"role": "assistant", "content": [{"type": "document"}]}, USER]
    assert feature(body(messages=messages), OLD).capability == Capability.DOCUMENTS
    error = refusal(body(messages=messages), NEW)
    assert not isinstance(error, UnsupportedFeature)
    assert "not permitted in assistant messages" in error.message


def test_counting_takes_the_same_conversation_and_no_limit():
    raw = body(max_tokens=..., system="s")
    counted = parse_count_tokens(raw, NEW)
    assert counted.messages == parse_messages(body(system="s"), NEW).messages
    assert counted.max_tokens is None
    for fields in ({"max_tokens": 5}, {"max_tokens": ..., "stream": True}):
        error = refusal(body(**fields), NEW, parse_count_tokens)
        assert error.message.endswith("Extra inputs are not permitted")
    noted = feature(body(max_tokens=..., tools=[TOOL]), NEW, parse_count_tokens)
    assert noted.capability == Capability.TOOLS
    assert refusal(raw, "x", parse_count_tokens).param == "anthropic-version"
