"""What goes to Claude and what never does; the official SDK through the router; the money."""

import asyncio
import logging
from pathlib import Path

import anthropic
import openai
import pytest

from router.backends.direct import DirectUpstream
from router.backends.upstream import UpstreamSettings
from router.limits.limiter import Limiter
from router.limits.policy import Limits
from router.teams import Team
from tests.fakes.backend import FakeBackend
from tests.fakes.routed import ALL, KEY_ENV, UPSTREAM_KEY, Routed, claude_body, gpt_body
from tests.fakes.router import KEY, MODEL, served
from tests.fakes.upstream import Script, content, refusal, stream, whole

IDS = (504, 3575, 282, 4649, 314, 2)
ANSWER = "Paris is the capital of France."
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FORBIDDEN = {
    "cookie": "session=1",
    "x-anthropic-team-id": "blue",
    "x-team": "blue",
    "x-forwarded-for": "10.0.0.1",
    "x-stainless-read-timeout": "600",
    "anthropic-workspace-id": "w",
}
ALLOWED = {
    "anthropic-version": "2099-01-01",
    "anthropic-beta": "unheard-of-2099-01-01, b",
    "x-stainless-lang": "python",
    "user-agent": "claude-cli/9",
}


@pytest.fixture
def routed(smollm2_path: Path, monkeypatch) -> Routed:
    monkeypatch.setenv(KEY_ENV, UPSTREAM_KEY)
    return Routed(smollm2_path, FakeBackend(token_ids=IDS))


@pytest.fixture
async def client(routed: Routed):
    async with routed.client() as client:
        yield client


@pytest.mark.parametrize("model", ["claude", "claude-proxy"])
@pytest.mark.parametrize("credentials", ["x-api-key", "authorization"])
async def test_headers_go_out_by_allow_list(routed, client, model, credentials):
    headers = {**FORBIDDEN, **ALLOWED}
    if credentials == "authorization":
        headers |= {"authorization": f"Bearer {KEY}", "x-api-key": ""}
    await client.post("/v1/messages", json=claude_body(model), headers=headers)
    (seen,) = [each for up in routed.upstreams.values() for each in up.seen]
    assert {name: seen.headers.get(name) for name in ALLOWED} == ALLOWED
    assert seen.headers["content-type"] == "application/json"
    assert seen.headers["accept-encoding"] == "identity"
    for name in FORBIDDEN.keys() - {"x-anthropic-team-id"}:
        assert name not in seen.headers
    assert KEY not in str(seen)
    if model == "claude":
        assert seen.headers["x-api-key"] == UPSTREAM_KEY
        assert not seen.headers.keys() & {"authorization", "x-anthropic-team-id"}
    else:
        assert seen.headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
        assert seen.headers["x-anthropic-team-id"] == "red"
        assert "x-api-key" not in seen.headers


@pytest.mark.parametrize(("query", "sent"), [("?beta=true", "?beta=true"), ("?key=1", "")])
async def test_of_the_query_only_beta_goes_out(routed, client, query, sent):
    await client.post(f"/v1/messages{query}", json=claude_body("claude"))
    assert routed.upstreams["direct"].seen[0].path == f"/v1/messages{sent}"


@pytest.mark.parametrize("echo", [401, 403, 400, 500, 429])
async def test_an_upstream_that_echoes_our_key_finds_no_audience(routed, client, caplog, echo):
    said = f'{{"error":{{"type":"x","message":"key {UPSTREAM_KEY} is bad"}}}}'.encode()
    routed.upstreams["direct"].script(refusal(echo, said))
    with caplog.at_level(logging.DEBUG):
        answer = await client.post("/v1/messages", json=claude_body("claude"))
    assert UPSTREAM_KEY not in answer.text + caplog.text + str(routed.sink.records)
    assert "credentials" in answer.text or echo not in (401, 403)


async def test_a_key_is_read_when_it_is_used(routed, client, monkeypatch, tmp_path: Path):
    monkeypatch.delenv(KEY_ENV)
    answer = await client.post("/v1/messages", json=claude_body("claude"))
    assert answer.status_code == 503
    assert KEY_ENV in answer.json()["error"]["message"]
    file = tmp_path / "key"
    file.write_text("first\n")
    settings = UpstreamSettings("direct", "direct", "https://d.test", api_key_file=file)
    transport = routed.upstreams["direct"].transport()
    routed.pool.upstreams["direct"] = DirectUpstream(settings, transport)
    await client.post("/v1/messages", json=claude_body("claude"))
    file.write_text("second\n")
    await client.post("/v1/messages", json=claude_body("claude"))
    keys = [seen.headers["x-api-key"] for seen in routed.upstreams["direct"].seen]
    assert keys == ["first", "second"]


async def test_usage_is_the_upstreams_own(routed, client):
    routed.upstreams["direct"].script(stream("anthropic_thinking"), whole("anthropic_whole.json"))
    await client.post("/v1/messages", json=claude_body("claude", stream=True))
    await client.post("/v1/messages", json=claude_body("claude"))
    streamed, whole_one = routed.sink.records
    assert (streamed.prompt_tokens, streamed.cached_tokens) == (35, 7)
    assert (streamed.completion_tokens, streamed.reasoning_tokens) == (40, 28)
    assert (whole_one.completion_tokens, whole_one.reasoning_tokens) == (12, 5)
    assert streamed.is_exact
    assert whole_one.is_exact
    assert streamed.is_stream
    assert streamed.model == "claude-up"
    assert streamed.ttft_ms is not None
    assert routed.backend.acknowledged == []


async def test_usage_without_a_count_is_a_guess_that_says_so(routed, client):
    routed.upstreams["gpt"].script(stream("openai_no_usage"))
    await client.post("/v1/chat/completions", json=gpt_body("gpt", stream=True))
    (record,) = routed.sink.records
    assert not record.is_exact
    assert record.prompt_tokens > 10
    assert record.completion_tokens >= 2


async def test_an_upstream_request_is_reserved_once_and_settled(
    smollm2_path: Path, monkeypatch, valkey
):
    monkeypatch.setenv(KEY_ENV, UPSTREAM_KEY)
    limits = Limits(requests_per_minute=3, tokens_per_minute=10_000)
    team = Team("red", backends=ALL, limits=limits)
    routed = Routed(smollm2_path, FakeBackend(token_ids=IDS), [team], limiter=Limiter(valkey))
    async with routed.client() as client:
        for script in (stream("anthropic_text"), refusal(503), refusal(503)):
            routed.upstreams["proxy"].script(script)
            answer = await client.post("/v1/messages", json=claude_body("safe", stream=True))
            assert answer.status_code == 200
        refused = await client.post("/v1/messages", json=claude_body("safe"))
    assert refused.status_code == 429
    assert "anthropic-ratelimit-requests-remaining" in answer.headers
    assert len(routed.upstreams["proxy"].seen) == 3
    used = sum(r.prompt_tokens + r.completion_tokens for r in routed.sink.records)
    settled = int(await valkey.hget("flashray:{red}:buckets", "settled_tokens"))
    assert settled == used
    assert await valkey.zcard("flashray:{red}:leases") == 0


@pytest.mark.parametrize(
    ("model", "backends", "egress", "expected"),
    [
        ("claude", {"local"}, True, 403),
        ("claude", {"direct"}, False, "direct"),
        ("house", {"direct"}, True, 403),
        (MODEL, {"direct"}, True, 403),
        ("outward", {"local", "direct"}, True, "direct"),
        ("outward", {"local", "direct"}, False, 529),
        ("inward", {"local", "direct"}, True, 529),
        ("outward", {"direct"}, False, 403),
    ],
)
async def test_rights_and_egress(smollm2_path, monkeypatch, model, backends, egress, expected):
    from router.errors import Overloaded

    monkeypatch.setenv(KEY_ENV, UPSTREAM_KEY)
    team = Team("red", backends=frozenset(backends), egress=egress)
    backend = FakeBackend(token_ids=IDS, refuse=Overloaded("full"))
    routed = Routed(smollm2_path, backend, [team])
    async with routed.client() as client:
        answer = await client.post("/v1/messages", json=claude_body(model, stream=True))
    if isinstance(expected, int):
        assert answer.status_code == expected
        assert routed.num_upstream_requests == 0
    else:
        assert answer.headers["x-flashray-backend"] == expected


async def test_a_team_without_the_model_reaches_no_target(smollm2_path, monkeypatch):
    monkeypatch.setenv(KEY_ENV, UPSTREAM_KEY)
    team = Team("red", models=frozenset({"house"}), backends=ALL)
    routed = Routed(smollm2_path, FakeBackend(token_ids=IDS), [team])
    async with routed.client() as client:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = await client.post(path, json=claude_body("claude"))
            assert answer.status_code == 403
    assert routed.num_upstream_requests == 0


async def test_count_tokens(routed, client):
    counted = Script((b'{ "input_tokens":  7 }',), headers={"content-type": "application/json"})
    routed.upstreams["direct"].script(counted)
    body = {"model": "claude", "messages": QUESTION, "unknown": 1.0}
    answer = await client.post("/v1/messages/count_tokens", json=body)
    assert answer.content == b'{ "input_tokens":  7 }'
    assert routed.upstreams["direct"].seen[0].path == "/v1/messages/count_tokens"
    for _ in range(4):
        routed.upstreams["direct"].script(refusal(404))
        answer = await client.post("/v1/messages/count_tokens", json=body)
        assert answer.status_code == 404
        routed.upstreams["proxy"].script(refusal(500))
        answer = await client.post("/v1/messages/count_tokens", json={**body, "model": "safe"})
        assert answer.status_code == 400  # `unknown` is one field too much for the local model
    assert not any(breaker.is_open for breaker in routed.pool.breakers.values())
    answer = await client.post("/v1/messages/count_tokens", json={**body, "model": "gpt"})
    assert answer.status_code == 400


async def test_models_are_listed_and_described(client):
    listed = (await client.get("/v1/models?limit=100")).json()["data"]
    names = [card["id"] for card in listed]
    assert names[:2] == [MODEL, "small"]
    assert {"claude", "sonnet", "safe", "gpt"} < set(names)
    card = (await client.get("/v1/models/claude")).json()
    assert card["capabilities"]["image_input"]["supported"]
    assert card["max_input_tokens"] == 200_000
    status = (await client.get("/v1/status")).json()
    assert {"name": "direct", "is_open": False} in status["backends"]


async def test_a_client_that_leaves_cancels_the_upstream(routed):
    with routed.upstreams["direct"].served() as upstream_url:
        settings = UpstreamSettings("direct", "direct", upstream_url)
        routed.pool.upstreams["direct"] = DirectUpstream(settings)
        text = content("anthropic_text")
        half = text[: text.index(b"of France")]
        routed.upstreams["direct"].script(Script((half,), ends="stall"))
        with served(routed.app) as url:
            claude = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
            with claude.messages.create(**claude_body("claude"), stream=True) as events:
                for event in events:
                    if event.type == "content_block_delta":
                        break
            claude.close()
            for _ in range(100):
                if routed.sink.records:
                    break
                await asyncio.sleep(0.05)
        (record,) = routed.sink.records
        assert routed.upstreams["direct"].num_abandoned == 1
    assert (record.prompt_tokens, record.is_exact) == (35, False)
    assert not routed.pool.breakers["direct"].is_open


def test_official_sdks_through_every_pair_of_dialects(routed):
    for upstream, script in (("direct", "anthropic_text"), ("gpt", "openai_text")):
        routed.upstreams[upstream].default = stream(script)
    with served(routed.app) as url:
        claude = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)
        gpt = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        for model in ("claude", "gpt"):
            with claude.messages.stream(model=model, max_tokens=9, messages=QUESTION) as stream_:
                message = stream_.get_final_message()
            assert message.content[0].text == ANSWER
            assert message.usage.output_tokens in (9, 12)
            options = {"include_usage": True}
            chunks = list(
                gpt.chat.completions.create(
                    model=model, messages=QUESTION, stream=True, stream_options=options
                )
            )
            said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
            assert "".join(said) == ANSWER
            assert chunks[-1].usage.prompt_tokens in (30, 35)
        completion = gpt.chat.completions.create(model="claude", messages=QUESTION)
        message = claude.messages.create(model="gpt", max_tokens=9, messages=QUESTION)
        claude.close()
        gpt.close()
    assert completion.choices[0].message.content == message.content[0].text == ANSWER
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (35, 12)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (26, 4)
