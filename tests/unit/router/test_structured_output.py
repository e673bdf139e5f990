"""What a client wants its answer to be, from the body of either dialect to the backend."""

import json

import httpx
import pytest

from router.capabilities import Capability
from router.errors import InvalidRequest
from router.generation import Grammar, GrammarKind
from router.protocols.anthropic.parse import parse_count_tokens, parse_messages
from router.protocols.base import MAX_GRAMMAR_CHARACTERS
from router.protocols.openai.parse import parse_chat
from tests.fakes.backend import FakeBackend
from tests.fakes.routed import KEY_ENV, UPSTREAM_KEY, Routed, claude_body, gpt_body
from tests.fakes.router import KEY, MODEL, router_app

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
VERSION = "2026-10-21"


def openai_body(**fields) -> bytes:
    return json.dumps({"model": MODEL, "messages": HELLO, **fields}).encode()


def claude(**fields) -> bytes:
    return json.dumps({"model": MODEL, "max_tokens": 9, "messages": HELLO, **fields}).encode()


def json_schema(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": False}, {"strict": None}])
def test_an_openai_schema(strict):
    chat = parse_chat(openai_body(response_format=json_schema(SCHEMA, **strict)))
    assert chat.grammar is not None
    assert chat.grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(chat.grammar.text) == SCHEMA
    assert [feature.capability for feature in chat.features] == [Capability.STRUCTURED_OUTPUT]


def test_an_openai_object_and_a_regex():
    chat = parse_chat(openai_body(response_format={"type": "json_object"}))
    assert chat.grammar == Grammar(GrammarKind.JSON_OBJECT)
    chat = parse_chat(
        openai_body(structured_outputs={"regex": "a+"}, response_format={"type": "text"})
    )
    assert chat.grammar == Grammar(GrammarKind.REGEX, "a+")
    assert parse_chat(openai_body(response_format={"type": "text"})).grammar is None


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        {
            "output_config": {"effort": "low", "format": None},
            "output_format": {"type": "json_schema", "schema": SCHEMA},
        },
    ],
)
def test_a_claude_schema(fields):
    chat = parse_messages(claude(**fields), VERSION)
    assert chat.grammar is not None
    assert json.loads(chat.grammar.text) == SCHEMA
    assert [feature.capability for feature in chat.features] == [Capability.STRUCTURED_OUTPUT]
    counted = json.dumps({"model": MODEL, "messages": HELLO, **fields}).encode()
    assert parse_count_tokens(counted, VERSION).grammar is None


LONG = {"const": "x" * MAX_GRAMMAR_CHARACTERS}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        (
            {"response_format": json_schema([])},
            "response_format.json_schema.schema",
            "should be an object",
        ),
        ({"response_format": json_schema(LONG)}, "response_format.json_schema.schema", "65536"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "at least 1"),
        ({"structured_outputs": {}}, "structured_outputs.regex", "required"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.regex", "required"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "Unrecognized",
        ),
        (
            {"structured_outputs": {"regex": LONG["const"] + "x"}},
            "structured_outputs.regex",
            "at most 65536 characters, got 65537",
        ),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "structured_outputs",
            "send one of them",
        ),
    ],
)
def test_what_openai_forbids_is_named(fields, param, words):
    with pytest.raises(InvalidRequest, match=words) as refused:
        parse_chat(openai_body(**fields))
    assert refused.value.param == param


FORMAT = {"type": "json_schema", "schema": {}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"output_config": {"format": {}}}, "output_config.format.type", "required"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
            "required",
        ),
        (
            {"output_config": {"format": {"type": "regex", "schema": {}}}},
            "output_config.format.type",
            "json_schema",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": LONG}}},
            "output_config.format.schema",
            "65536",
        ),
        (
            {"output_config": {"format": FORMAT}, "output_format": FORMAT},
            "output_format",
            "send only the latter",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": "x", "output_config": {"format": FORMAT}},
                    *HELLO,
                ]
            },
            "messages.0.output_config.format",
            "Extra inputs are not permitted",
        ),
    ],
)
def test_what_claude_forbids_is_named(fields, param, words):
    with pytest.raises(InvalidRequest, match=words) as refused:
        parse_messages(claude(**fields), VERSION)
    assert refused.value.param == param


BODIES = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": HELLO,
        "n": 2,
        "response_format": json_schema(SCHEMA),
    },
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 9,
        "messages": HELLO,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}
HEADERS = {"authorization": f"Bearer {KEY}", "anthropic-version": VERSION}


@pytest.mark.parametrize("path", BODIES)
async def test_the_backend_hears_of_it_with_every_completion(smollm2_path, path):
    backend = FakeBackend(token_ids=(504, 2))
    transport = httpx.ASGITransport(router_app(smollm2_path, backend))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://router", headers=HEADERS
    ) as client:
        answer = await client.post(path, json=BODIES[path])
    assert answer.status_code == 200, answer.text
    assert len(backend.requests) == BODIES[path].get("n", 1)
    for request in backend.requests:
        assert request.sampling.grammar is not None
        assert json.loads(request.sampling.grammar.text) == SCHEMA


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_what_the_backend_cannot_follow_is_the_callers_error(smollm2_path, path, stream):
    refusal = InvalidRequest("this json_schema cannot be followed: Invalid type: strin; change it")
    backend = FakeBackend(refuse=refusal)
    transport = httpx.ASGITransport(router_app(smollm2_path, backend))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://router", headers=HEADERS
    ) as client:
        answer = await client.post(path, json={**BODIES[path], "stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"] == refusal.message


async def test_an_upstream_gets_what_only_it_can_judge(smollm2_path, monkeypatch):
    """In its own dialect as it came; in the other it is not translated, and nothing is sent."""
    monkeypatch.setenv(KEY_ENV, UPSTREAM_KEY)
    routed = Routed(smollm2_path, FakeBackend())
    own = claude_body("claude", stream=True, output_config={"format": {"schema": 5}})
    other = gpt_body("claude", stream=True, response_format=json_schema(SCHEMA))
    async with routed.client() as client:
        assert (await client.post("/v1/messages", json=own)).status_code == 200
        refused = await client.post("/v1/chat/completions", json=other)
    (seen,) = routed.upstreams["direct"].seen
    assert json.loads(seen.content)["output_config"] == {"format": {"schema": 5}}
    assert refused.status_code == 400
    assert "structured_output is not translated" in refused.json()["error"]["message"]
