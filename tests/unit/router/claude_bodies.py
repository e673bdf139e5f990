"""Bodies of the Claude dialect, and what their parser says of them."""

import json

import pytest

from router.capabilities import Feature
from router.errors import InvalidRequest
from router.protocols.anthropic.parse import parse_messages

OLD, NEW = "2023-06-01", "2026-10-21"
USER = {"role": "user", "content": "Hello"}


TOOL = {"name": "f", "input_schema": {"type": "object"}}


def body(**fields):
    whole = {"model": "local", "max_tokens": 16, "messages": [USER], **fields}
    return json.dumps({name: value for name, value in whole.items() if value is not ...}).encode()


def refusal(raw, version=OLD, parse=parse_messages):
    with pytest.raises(InvalidRequest) as caught:
        parse(raw, version)
    return caught.value


def feature(raw, version=OLD, parse=parse_messages) -> Feature:
    """The only thing that `raw` asks for beyond text."""
    (only,) = parse(raw, version).features
    return only


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def tool_use(tool_use_id="t1"):
    return {"type": "tool_use", "id": tool_use_id, "name": "f", "input": {}}


def tool_result(tool_use_id="t1"):
    return {"type": "tool_result", "tool_use_id": tool_use_id, "content": "21 °C"}


def user(*blocks):
    return [{"role": "user", "content": list(blocks)}]
