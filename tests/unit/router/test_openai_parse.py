"""Bodies of the OpenAI dialect: what is understood, what is refused, and in which words."""

import json

import pytest

from router.chat import ChatMessage, ChatRequest
from router.errors import InvalidRequest, UnsupportedFeature
from router.protocols.openai.parse import parse_chat

USER = {"role": "user", "content": "Hello"}


def body(**fields):
    whole = {"model": "local", "messages": [USER], **fields}
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


def refusal(raw):
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(raw)
    return caught.value


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def test_the_smallest_body():
    assert parse_chat(body()) == ChatRequest(
        model="local", messages=(ChatMessage("user", "Hello"),), max_tokens=None
    )


def test_every_field_that_has_an_effect():
    raw = body(
        max_completion_tokens=16,
        temperature=2,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": -100, "17": 1.5},
        logprobs=True,
        top_logprobs=20,
        seed=-7,
        stop=["a", "\n"],
        n=8,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    assert parse_chat(raw) == ChatRequest(
        model="local",
        messages=(ChatMessage("user", "Hello"),),
        max_tokens=16,
        temperature=2.0,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((5, -100.0), (17, 1.5)),
        num_logprobs=20,
        seed=-7,
        stop_strings=("a", "\n"),
        num_completions=8,
        stream=True,
        include_usage=True,
    )


def test_fields_without_effect_are_accepted():
    raw = body(
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="priority",
        parallel_tool_calls=True,
        prompt_cache_key="k",
        prompt_cache_retention="24h",
        reasoning_effort="high",
        safety_identifier="s",
        verbosity="low",
        modalities=["text"],
        response_format={"type": "text"},
        tools=[],
        tool_choice="auto",
        function_call="none",
    )
    assert parse_chat(raw) == parse_chat(body())


def test_null_is_absence():
    names = "temperature top_p max_tokens n stop seed stream logprobs tools audio stream_options"
    assert parse_chat(body(**dict.fromkeys(names.split()))) == parse_chat(body())


def test_roles_and_forms_of_content():
    text = "  <script>x</script> {{ y }} 🦊\n"
    messages = [
        {"role": "developer", "content": text},
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": text}], "name": "ann"},
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []},
        *user({"type": "text", "text": "a"}, {"type": "text", "text": "b"}),
    ]
    assert parse_chat(body(messages=messages)).messages == (
        ChatMessage("system", text),
        ChatMessage("system", ""),
        ChatMessage("user", text),
        ChatMessage("assistant", "x"),
        ChatMessage("user", "a\nb"),
    )


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
    ],
)
def test_both_names_of_the_token_limit(fields, max_tokens):
    assert parse_chat(body(**fields)).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)],
)
def test_logprobs_without_alternatives(fields, num_logprobs):
    assert parse_chat(body(**fields)).num_logprobs == num_logprobs


def test_values_that_switch_something_off():
    chat = parse_chat(body(top_k=-1, top_p=0, stop="END"))
    assert chat.top_k is None
    assert 0 < chat.top_p < 1e-3
    assert chat.stop_strings == ("END",)
    assert parse_chat(body(top_k=0)).top_k is None


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "not valid JSON: EOF"),
        (b'{"a": 1}}', "line 1 column 9"),
        (b'{"model": "\xff"}', "invalid unicode code point"),
        (b"[]", "must be a JSON object"),
    ],
)
def test_what_is_not_a_json_object_is_refused(raw, words):
    assert words in refusal(raw).message


def test_unknown_arguments_are_refused_in_the_words_of_the_api():
    error = refusal(body(guided_json={}))
    assert error.message == "Unrecognized request argument supplied: guided_json"
    assert error.param == "guided_json"
    assert refusal(body(messages=[{**USER, "x": 1}])).param == "messages[0].x"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": ...}, "model", "Field required"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "'developer'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "got null"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "or an array"),
        ({"messages": user()}, "messages[0].content", "at least 1 item"),
        ({"messages": user({"type": "poem"})}, "messages[0].content[0]", "'poem'"),
        (
            {"messages": [USER, {"role": "assistant", "content": "x"}]},
            "messages[1].role",
            "partial",
        ),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "send one of them"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "greater than or equal to -2"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 9}, "n", "less than or equal to 8"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["a"] * 5}, "stop", "at most 4 items"),
        ({"stop": ""}, "stop", "at least one character"),
        ({"stop": ["a", ""]}, "stop", "at least one character"),
        ({"stop": ["x" * 20_000]}, "stop", "at most 16384 characters"),
        ({"stop": 5}, "stop", "string or an array"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 5}, "top_logprobs", "'logprobs' is true"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"the": 1}}, "logit_bias.the", "pattern"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "'stream' is true"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_schema'"),
    ],
)
def test_wrong_fields_are_named(fields, param, words):
    error = refusal(body(**fields))
    assert error.param == param
    assert words in error.message
    assert not isinstance(error, UnsupportedFeature)


def test_numbers_must_be_finite():
    raw = body(temperature=777).replace(b"777", b"NaN")
    assert "finite" in refusal(raw).message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"messages": user({"type": "image_url", "image_url": {}})}, "messages[0].content[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}, USER]},
            "messages[1].tool_calls",
        ),
    ],
)
def test_what_a_local_model_cannot_do_is_refused_by_name(fields, param):
    error = refusal(body(**fields))
    assert isinstance(error, UnsupportedFeature)
    assert error.param == param
