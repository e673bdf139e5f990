"""Bodies of the OpenAI dialect: what is understood, what is refused, and in which words."""

import json
from typing import get_args

import pytest

from router.capabilities import Capability, check_features
from router.chat import ChatMessage, ChatRequest
from router.errors import InvalidRequest, UnsupportedFeature
from router.protocols.openai.features import PART_CAPABILITIES
from router.protocols.openai.parse import parse_chat
from router.protocols.openai.schema import OtherPart

USER = {"role": "user", "content": "Hello"}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def call(call_id):
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


CALL = {"role": "assistant", "tool_calls": [call("c1")]}
ANSWER = {"role": "tool", "tool_call_id": "c1", "content": "21"}


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
        ignore_eos=True,
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
        ignore_eos=True,
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
        stream_options={"include_obfuscation": True},
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
        ({"max_tokens": 0, "max_completion_tokens": 0}, 0),
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
        ({"messages": [{"role": "assistant"}, USER]}, "messages[0].content", "got null"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.function", "Field required"),
        ({"tools": [{"type": "poem"}]}, "tools[0]", "'poem'"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "send one of them"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"temperature": "1"}, "temperature", "valid number"),
        ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"min_p": 1.1}, "min_p", "less than or equal to 1"),
        ({"ignore_eos": 1}, "ignore_eos", "valid boolean"),
        (
            {"ignore_eos": True, "response_format": {"type": "json_object"}},
            "ignore_eos",
            "ends with the end token",
        ),
        (
            {"ignore_eos": True, "structured_outputs": {"regex": "a"}},
            "ignore_eos",
            "ends with the end token",
        ),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "greater than or equal to -2"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 9}, "n", "less than or equal to 8"),
        ({"seed": 2**63}, "seed", "less than 9223372036854775808"),
        ({"seed": -(2**63) - 1}, "seed", "greater than or equal to -9223372036854775808"),
        ({"seed": 10**40}, "seed", "less than 9223372036854775808"),
        ({"stop": ["a"] * 5}, "stop", "at most 4 items"),
        ({"stop": ""}, "stop", "at least one character"),
        ({"stop": ["a", ""]}, "stop", "at least one character"),
        ({"stop": ["x" * 20_000]}, "stop", "at most 16384 characters"),
        ({"stop": 5}, "stop", "string or an array"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"top_logprobs": 5}, "top_logprobs", "'logprobs' is true"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"stream_options": {"include": True}}, "stream_options.include", "Unrecognized"),
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
    ("fields", "capability", "param"),
    [
        ({"tools": [TOOL]}, "tools", "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "tools"),
        ({"functions": [{"name": "f"}]}, "tools", "functions"),
        ({"tool_choice": "required"}, "tools", "tool_choice"),
        ({"function_call": {"name": "f"}}, "tools", "function_call"),
        ({"response_format": {"type": "json_object"}}, "structured_output", "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {}},
                }
            },
            "structured_output",
            "response_format",
        ),
        (
            {"structured_outputs": {"regex": "a+"}},
            "structured_output",
            "structured_outputs",
        ),
        ({"audio": {"voice": "x"}}, "audio", "audio"),
        ({"modalities": ["text", "audio"]}, "audio", "modalities"),
        ({"moderation": {"model": "x"}}, "moderation", "moderation"),
        ({"prediction": {"type": "content"}}, "prediction", "prediction"),
        ({"web_search_options": {}}, "web_search", "web_search_options"),
        ({"store": True}, "store", "store"),
        ({"logit_bias": {"7": 1, "the": 1}}, "text_logit_bias", "logit_bias"),
        (
            {"messages": [USER, {"role": "assistant", "content": "x"}]},
            "prefill",
            "messages[1].role",
        ),
        (
            {"messages": user({"type": "image_url", "image_url": {}})},
            "images",
            "messages[0].content[0]",
        ),
        ({"messages": [USER, CALL, ANSWER]}, "tools", "messages[1].tool_calls"),
        ({"messages": [{"role": "function", "name": "f"}, USER]}, "tools", "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "refusal": "no"}, USER]},
            "refusals",
            "messages[0].refusal",
        ),
    ],
)
def test_what_not_every_model_can_do_is_noted_in_words_of_a_refusal(fields, capability, param):
    (noted,) = parse_chat(body(**fields)).features
    assert (noted.capability, noted.param) == (capability, param)
    check_features((noted,), frozenset({Capability(capability)}))
    with pytest.raises(UnsupportedFeature) as caught:
        check_features((noted,), frozenset(Capability) - {Capability(capability)})
    assert caught.value.message.startswith(f"Unsupported value for '{param}': ")
    assert caught.value.param == param


def test_biases_for_token_ids_are_kept_beside_others():
    assert parse_chat(body(logit_bias={"7": 1, "the": 2})).logit_bias == ((7, 1.0),)


def test_every_part_of_the_dialect_has_a_capability():
    assert set(get_args(OtherPart.model_fields["type"].annotation)) == set(PART_CAPABILITIES)


def test_calls_are_answered_in_any_order():
    both = {"role": "assistant", "content": "x", "tool_calls": [call("a"), call("b")]}
    messages = [USER, both, {**ANSWER, "tool_call_id": "b"}, {**ANSWER, "tool_call_id": "a"}]
    assert parse_chat(body(messages=messages)).messages == (
        ChatMessage("user", "Hello"),
        ChatMessage("assistant", "x"),
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([USER, {**ANSWER, "tool_call_id": "c1"}], "messages[1].tool_call_id"),
        ([USER, CALL, {**ANSWER, "tool_call_id": "c2"}], "messages[2].tool_call_id"),
        ([USER, CALL, ANSWER, ANSWER], "messages[3].tool_call_id"),
        ([USER, CALL, USER], "messages[1].tool_calls"),
        ([USER, CALL], "messages[1].tool_calls"),
        ([USER, {**CALL, "tool_calls": [{}]}], "messages[1].tool_calls[0].id"),
    ],
)
def test_tools_out_of_order_are_refused_for_every_model(messages, param):
    error = refusal(body(messages=messages))
    assert error.param == param
    assert not isinstance(error, UnsupportedFeature)
