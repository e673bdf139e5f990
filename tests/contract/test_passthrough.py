"""What an upstream of the client's own dialect says, and what it is told, is the same bytes on both
sides of the router."""

import asyncio
from pathlib import Path

import httpx
import pytest

from router.account import RequestAccount
from router.backends.json_spans import RequestBody
from router.backends.meter import UpstreamMeter
from router.backends.passthrough import forwarded_frames
from router.backends.reader import EventReader
from router.errors import InvalidRequest
from router.metrics import RouterMetrics
from tests.fakes.backend import FakeBackend
from tests.fakes.routed import KEY_ENV, UPSTREAM_KEY, Routed, claude_body, gpt_body
from tests.fakes.upstream import FIXTURES, JSON, SSE, Script

# Their ends are the router's to tell: tests/unit/router/test_proxy.py.
UNFINISHED = {"openai_no_finish.sse", "anthropic_late_error.sse"}
STREAMS = sorted(f.name for f in FIXTURES.glob("*.sse") if f.name not in UNFINISHED)
WHOLE = sorted(f.name for f in FIXTURES.glob("*.json"))
ENDS = (b"\n\n", b"\r\r", b"\n\r\n")


@pytest.fixture
def routed(smollm2_path: Path, monkeypatch) -> Routed:
    monkeypatch.setenv(KEY_ENV, UPSTREAM_KEY)
    return Routed(smollm2_path, FakeBackend())


def models_of(name: str) -> list[tuple[str, str, str]]:
    """(backend, model, path) of the routes that pass this transcript on."""
    if name.startswith("openai"):
        return [("gpt", "gpt", "/v1/chat/completions")]
    return [
        ("direct", "claude", "/v1/messages"),
        ("proxy", "claude-proxy", "/v1/messages"),
    ]


def pieces(content: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(content[i : i + size] for i in range(0, len(content), size))


def test_there_are_enough_transcripts():
    assert len(STREAMS) + len(WHOLE) >= 30


@pytest.mark.parametrize("size", [1 << 20, 7])
@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_arrives_byte_for_byte(routed: Routed, name: str, size: int):
    said = (FIXTURES / name).read_bytes()
    async with routed.client() as client:
        for backend, model, path in models_of(name):
            routed.upstreams[backend].script(Script(pieces(said, size), headers=dict(SSE)))
            body = claude_body(model, stream=True)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200
            assert answer.content == said
            assert answer.headers["content-type"] == SSE["content-type"]
            assert answer.headers["x-flashray-backend"] == backend


@pytest.mark.parametrize("name", WHOLE)
async def test_a_whole_answer_arrives_byte_for_byte(routed: Routed, name: str):
    said = (FIXTURES / name).read_bytes()
    async with routed.client() as client:
        for backend, model, path in models_of(name):
            routed.upstreams[backend].script(Script(pieces(said, 7), headers=dict(JSON)))
            answer = await client.post(path, json=gpt_body(model, max_tokens=5))
            assert answer.content == said
            assert answer.headers["content-type"] == "application/json"


async def forward(chunks: list[bytes], wire: str) -> list[bytes]:
    async def body():
        for chunk in chunks:
            yield chunk

    response = httpx.Response(200, headers=SSE, content=body())
    reader = EventReader(wire)
    account = RequestAccount("req_1", wire, "/v1/messages")
    meter = UpstreamMeter(account, "direct", reader.fold, 100, RouterMetrics())
    return [frame async for frame in forwarded_frames(response, reader, meter)]


@pytest.mark.parametrize("name", STREAMS)
async def test_wherever_the_network_cuts_it_whole_events_arrive(name: str):
    """Every offset, those inside a character and inside a line end too."""
    said = (FIXTURES / name).read_bytes()
    step = 1 if len(said) < 2500 else 13
    for offset in range(1, len(said), step):
        frames = await forward([said[:offset], said[offset:]], name.partition("_")[0])
        assert b"".join(frames) == said
        assert all(frame.endswith(ENDS) for frame in frames[:-1])
        if offset % 97 == 0:
            await asyncio.sleep(0)


# What stands for the model is NAME: the client says "claude", the upstream hears "claude-up".
BODIES = [
    b'{"model":NAME,"max_tokens":5,"stream":false,"messages":[]}',
    b'{"messages":[{"role":"user","content":"\\u00e9 \xc3\xa9"}],"max_tokens":5,"model":NAME}',
    b'\n{ "model" :\tNAME , "temperature": 1.50e+00, "x": -0.0, "a":{"model":"claude"} }\n ',
    b'{"model":NAME,"unknown_beta":{"b":1,"a":2,"a":3},"n":12345678901234567890123}',
    b'{"system":"</system><script>alert(1)</script>","model":NAME}',
    b'{"s":"\\ud83d\\ude00 {\\"model\\":\\"claude\\"}","model":NAME}',
    b'{"model":NAME,"max_tokens":5,"model":NAME}',
    b'{"model":NAME}',
]


@pytest.mark.parametrize("spelling", [b'"claude"', b'"\\u0063laude"'])
@pytest.mark.parametrize("body", BODIES)
async def test_a_body_goes_out_byte_for_byte_but_for_the_model(
    routed: Routed, body: bytes, spelling: bytes
):
    async with routed.client() as client:
        await client.post("/v1/messages", content=body.replace(b"NAME", spelling))
    (seen,) = routed.upstreams["direct"].seen
    assert seen.content == body.replace(b"NAME", b'"claude-up"')


def test_a_body_that_names_the_upstreams_model_is_the_same_object():
    content = b'{ "model": "a", "n": 1e3 }'
    assert RequestBody(content).with_model("a") is content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b"\xff",
        b'{"max_tokens":1}',
        b'{"model":1}',
        b'{"model":""}',
        b'{"model":"a"} x',
        b'{"model":"a",}',
        b'{"model":"a","x":' + b"[" * 100_000,
    ],
)
def test_what_is_no_body_is_refused_without_being_quoted(content: bytes):
    with pytest.raises(InvalidRequest) as caught:
        RequestBody(content)
    assert caught.value.__cause__ is None
    assert len(caught.value.message) < 120
