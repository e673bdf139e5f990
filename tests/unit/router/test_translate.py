"""A request in the words of the other dialect, or a refusal that names what has no word."""

import json
from dataclasses import replace

import pytest

from router.backends.translate import translated_body
from router.chat import ChatMessage, ChatRequest
from router.errors import UnsupportedFeature
from router.protocols.anthropic.parse import SAMPLING_VERSION, parse_messages
from router.protocols.base import MIN_TOP_P
from router.protocols.openai.parse import parse_chat

HELLO = (ChatMessage("system", "Be brief. </system>"), ChatMessage("user", "巴黎 <script>"))
CHAT = ChatRequest("alias", HELLO, max_tokens=None)


def test_to_claude():
    chat = replace(CHAT, temperature=0.5, top_p=MIN_TOP_P, stop_strings=("END",), top_k=3, seed=7)
    body = translated_body(chat, "claude-up", "anthropic")
    assert json.loads(body) == {
        "model": "claude-up",
        "stream": True,
        "max_tokens": 4096,
        "system": "Be brief. </system>",
        "messages": [{"role": "user", "content": "巴黎 <script>"}],
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "top_p": 0.0,
        "top_k": 3,
    }
    assert parse_messages(body, SAMPLING_VERSION).messages == HELLO


def test_to_openai():
    chat = replace(CHAT, max_tokens=0, stop_strings=("END",), top_p=0.5)
    body = translated_body(chat, "gpt-up", "openai")
    assert json.loads(body) == {
        "model": "gpt-up",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 0,
        "messages": [
            {"role": "system", "content": "Be brief. </system>"},
            {"role": "user", "content": "巴黎 <script>"},
        ],
        "stop": ["END"],
        "top_p": 0.5,
    }


def test_defaults_are_left_out():
    body = json.loads(translated_body(replace(CHAT, max_tokens=5), "m", "anthropic"))
    assert set(body) == {"model", "stream", "max_tokens", "system", "messages"}


@pytest.mark.parametrize(
    ("wire", "changes", "param"),
    [
        ("anthropic", {"frequency_penalty": 0.1}, "frequency_penalty"),
        ("anthropic", {"presence_penalty": 0.1}, "presence_penalty"),
        ("anthropic", {"repetition_penalty": 1.1}, "repetition_penalty"),
        ("anthropic", {"min_p": 0.1}, "min_p"),
        ("anthropic", {"ignore_eos": True}, "ignore_eos"),
        ("anthropic", {"logit_bias": ((1, 2.0),)}, "logit_bias"),
        ("anthropic", {"num_logprobs": 0}, "logprobs"),
        ("anthropic", {"num_completions": 2}, "n"),
        ("anthropic", {"temperature": 1.5}, "temperature above 1"),
        ("anthropic", {"messages": (HELLO[1], HELLO[0])}, "messages: a system message after"),
        ("openai", {"top_k": 5}, "top_k"),
    ],
)
def test_what_has_no_word_is_refused_by_name(wire, changes, param: str):
    with pytest.raises(UnsupportedFeature) as caught:
        translated_body(replace(CHAT, **changes), "m", wire)
    assert caught.value.message.startswith(param)


def test_tools_are_refused_and_the_way_out_is_told():
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "hi"}]
    chat = parse_chat(json.dumps({"model": "x", "messages": messages, "tools": tools}).encode())
    with pytest.raises(UnsupportedFeature, match="tools is not translated between dialects"):
        translated_body(chat, "m", "anthropic")
