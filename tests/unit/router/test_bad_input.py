"""Every bad input gets its dialect's own error body and status; the backend never hears of it."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.config import RouterConfig
from tests.fakes.backend import FakeBackend
from tests.fakes.router import KEY, MODEL, router_app

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
CONTEXT = 256


def claude(**changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 8, "messages": HELLO, **changes}
    return {name: value for name, value in body.items() if value is not ...}


def openai(**changes: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": HELLO, **changes}
    return {name: value for name, value in body.items() if value is not ...}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(token_ids=(504, 2))  # The<|im_end|>


@pytest.fixture
async def client(smollm2_path: Path, backend: FakeBackend):
    config = RouterConfig(max_body_bytes=10_000)
    app = router_app(smollm2_path, backend, config, max_model_len=CONTEXT)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://router",
        headers={"authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01"},
    ) as client:
        yield client


def check_claude_error(answer: httpx.Response, status: int, kind: str, words: str) -> None:
    body = answer.json()
    assert answer.status_code == status, body
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert words in body["error"]["message"]
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def check_openai_error(answer: httpx.Response, status: int, code: str | None, words: str) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert words in body["error"]["message"]
    assert answer.headers["x-request-id"].startswith("req_")


WRONG_MESSAGES = {
    "roles": (claude(messages=[{"role": "robot", "content": "x"}]), "messages.0"),
    "assistant first": (claude(messages=[{"role": "assistant", "content": "x"}]), "user"),
    "no messages": (claude(messages=[]), "messages"),
    "messages of text": (claude(messages="hi"), "messages"),
    "empty content": (claude(messages=[{"role": "user", "content": ""}]), "messages.0"),
    "max_tokens negative": (claude(max_tokens=-1), "max_tokens"),
    "max_tokens above the context": (claude(max_tokens=CONTEXT + 1), f"{CONTEXT + 1} > {CONTEXT}"),
    "max_tokens missing": (claude(max_tokens=...), "max_tokens"),
    "max_tokens of text": (claude(max_tokens="8"), "max_tokens"),
    "model missing": (claude(model=...), "model"),
    "unknown field": (claude(colour="red"), "colour: Extra inputs are not permitted"),
    "temperature": (claude(temperature=1.5), "temperature"),
    "prompt too long": (
        claude(messages=[{"role": "user", "content": "word " * 400}]),
        f"the context of {CONTEXT} tokens",
    ),
    "tools": (claude(tools=[{"name": "f", "input_schema": {"type": "object"}}]), "tools"),
    "thinking": (claude(thinking={"type": "enabled", "budget_tokens": 1024}), "thinking"),
    "container": (claude(container="c_1"), "container"),
    "image": (
        claude(
            messages=[
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"},
                        }
                    ],
                }
            ]
        ),
        "image",
    ),
}


@pytest.mark.parametrize("name", WRONG_MESSAGES)
async def test_claude_bodies(client, backend: FakeBackend, name: str):
    body, words = WRONG_MESSAGES[name]
    for stream in (False, True):
        answer = await client.post(MESSAGES, json={**body, "stream": stream})
        check_claude_error(answer, 400, "invalid_request_error", words)
    assert backend.requests == []


WRONG_CHATS = {
    "roles": (openai(messages=[{"role": "robot", "content": "x"}]), "messages"),
    "no messages": (openai(messages=[]), "messages"),
    "max_tokens negative": (openai(max_tokens=-1), "max_tokens"),
    "max_tokens above the context": (openai(max_tokens=CONTEXT + 1), f"{CONTEXT + 1} > {CONTEXT}"),
    "model missing": (openai(model=...), "model"),
    "unknown field": (openai(colour="red"), "colour"),
    "temperature": (openai(temperature=2.5), "temperature"),
    "prompt too long": (
        openai(messages=[{"role": "user", "content": "word " * 400}]),
        f"the context of {CONTEXT} tokens",
    ),
    "logit_bias outside the vocabulary": (openai(logit_bias={"49152": 1}), "vocabulary of 49152"),
    "top_logprobs alone": (openai(top_logprobs=2), "logprobs"),
    "tools": (
        openai(tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        "tools",
    ),
    "a format without its schema": (
        openai(response_format={"type": "json_schema"}),
        "response_format.json_schema",
    ),
    "a schema that is none": (
        openai(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}),
        "response_format.json_schema.schema",
    ),
    "two formats": (
        openai(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
        "send one of them",
    ),
    "other structured outputs": (
        openai(structured_outputs={"choice": ["a", "b"]}),
        "structured_outputs.regex",
    ),
}


@pytest.mark.parametrize("name", WRONG_CHATS)
async def test_openai_bodies(client, backend: FakeBackend, name: str):
    body, words = WRONG_CHATS[name]
    for stream in (False, True):
        answer = await client.post(CHAT, json={**body, "stream": stream})
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert backend.requests == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"model": ', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[]", "JSON object"),
        (b'"text"', "JSON object"),
        (b'{"model": "\xff\xfe"}', "JSON"),
        (json.dumps(claude()).encode("utf-16"), "JSON"),
        (b'{"max_tokens": NaN}', ""),
        (b"[" * 5000, "JSON"),
    ],
)
async def test_bodies_that_are_not_json(client, backend, content: bytes, words: str):
    answer = await client.post(MESSAGES, content=content)
    check_claude_error(answer, 400, "invalid_request_error", words)
    answer = await client.post(CHAT, content=content)
    check_openai_error(answer, 400, None, words)
    assert backend.requests == []


@pytest.mark.parametrize("declared", [True, False])
async def test_bodies_over_the_limit(client, backend, declared: bool):
    async def chunks():
        for _ in range(11):
            yield b"x" * 1000

    content = b"x" * 10_001 if declared else chunks()
    check_claude_error(
        await client.post(MESSAGES, content=content), 413, "request_too_large", "10000 bytes"
    )
    content = b"x" * 10_001 if declared else chunks()
    check_openai_error(
        await client.post(CHAT, content=content), 413, "request_too_large", "10000 bytes"
    )
    assert backend.requests == []


async def test_compressed_bodies_are_refused(client):
    answer = await client.post(MESSAGES, content=b"x", headers={"content-encoding": "gzip"})
    check_claude_error(answer, 400, "invalid_request_error", "content-encoding")


async def test_unknown_model_names_the_known_ones(client, backend):
    answer = await client.post(MESSAGES, json=claude(model="gpt-9"))
    check_claude_error(answer, 404, "not_found_error", MODEL)
    answer = await client.post(CHAT, json=openai(model="gpt-9"))
    check_openai_error(answer, 404, "model_not_found", MODEL)
    answer = await client.get("/v1/models/gpt-9")
    check_claude_error(answer, 404, "not_found_error", MODEL)
    assert backend.requests == []


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "missing API key"),
        ({"authorization": "Bearer wrong"}, "invalid API key"),
        ({"authorization": "Basic abc"}, "missing API key"),
        ({"x-api-key": "wrong"}, "invalid API key"),
        ({"x-api-key": "wrong", "authorization": f"Bearer {KEY}"}, "different keys"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", MESSAGES),
        ("POST", f"{MESSAGES}/count_tokens"),
        ("POST", CHAT),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
    ],
)
async def test_keys(smollm2_path: Path, backend, headers, words: str, method: str, path: str):
    app = router_app(smollm2_path, backend)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://router"
    ) as client:
        answer = await client.request(method, path, headers=headers, content=b"{}")
    assert answer.status_code == 401
    assert words in answer.json()["error"]["message"]
    assert "wrong" not in answer.text
    assert backend.requests == []


async def test_anthropic_version_is_required_and_checked(client):
    del client.headers["anthropic-version"]
    answer = await client.post(MESSAGES, json=claude())
    check_claude_error(answer, 400, "invalid_request_error", "anthropic-version")
    answer = await client.post(MESSAGES, json=claude(), headers={"anthropic-version": "1999-01-01"})
    check_claude_error(answer, 400, "invalid_request_error", "2026-10-21")


async def test_sampling_is_gone_in_the_new_version(client):
    new = {"anthropic-version": "2026-10-21"}
    answer = await client.post(MESSAGES, json=claude(temperature=1.0), headers=new)
    check_claude_error(answer, 400, "invalid_request_error", "2023-06-01")
    assert (await client.post(MESSAGES, json=claude(), headers=new)).status_code == 200


async def test_unknown_routes_and_methods(client):
    check_claude_error(await client.get("/v1/nothing"), 404, "not_found_error", "GET /v1/nothing")
    check_claude_error(await client.get(MESSAGES), 405, "invalid_request_error", "use POST")
    del client.headers["anthropic-version"]
    check_openai_error(await client.get("/v1/nothing"), 404, "not_found", "no such route")
    check_openai_error(await client.get(CHAT), 405, "method_not_allowed", "use POST")


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=-1", "after_id=nobody"])
async def test_model_paging(client, query: str):
    check_claude_error(
        await client.get(f"/v1/models?{query}"), 400, "invalid_request_error", query.split("=")[0]
    )


async def test_the_backend_still_works_after_all_of_it(client, backend: FakeBackend):
    await client.post(MESSAGES, content=b"\xff")
    answer = await client.post(MESSAGES, json=claude())
    assert answer.status_code == 200
    assert answer.json()["content"] == [{"type": "text", "text": "The"}]
    assert len(backend.requests) == 1
    assert backend.aborted == []
