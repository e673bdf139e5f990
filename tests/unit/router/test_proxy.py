"""Upstreams that fail, in every way we know, and what the client is told instead."""

import json
import ssl
import subprocess
from pathlib import Path

import pytest

from router.backends.proxy import ProxyUpstream
from router.backends.upstream import UpstreamSettings
from router.sse.codec import EventDecoder
from tests.fakes.backend import FakeBackend
from tests.fakes.routed import KEY_ENV, UPSTREAM_KEY, Routed, claude_body, gpt_body
from tests.fakes.upstream import Script, content, refusal, stream, whole

IDS = (504, 3575, 282, 4649, 314, 2)
TEXT = content("anthropic_text")
BUSY = json.dumps({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
LIMITED = BUSY.replace("overloaded", "rate_limit")

LIFECYCLE = TEXT[: TEXT.index(b"event: content_block_start")]
FAULTS = {
    "429": (refusal(429, LIMITED.encode()), 429, "rate_limit_error"),
    "529": (refusal(529, BUSY.encode()), 529, "overloaded_error"),
    "500": (refusal(500, b"boom"), 500, "api_error"),
    "502": (refusal(502, b"<html>"), 503, "api_error"),
    "503": (refusal(503), 503, "api_error"),
    "401": (refusal(401, b'{"error":{"message":"bad key"}}'), 500, "api_error"),
    "302": (refusal(302, location="http://evil.test"), 500, "api_error"),
    "refused": (Script(ends="refuse"), 503, "api_error"),
    "stall": (Script(ends="stall"), 503, "api_error"),
    "cut": (Script(ends="cut"), 503, "api_error"),
    "empty": (Script(), 500, "api_error"),
    "html": (Script((b"<html>",), headers={"content-type": "text/html"}), 500, "api_error"),
    "garbage": (Script((b"data: {not json\n\n",)), 500, "api_error"),
    "object": (Script((BUSY.encode(),), headers={"content-type": "application/json"}), 529, "over"),
}
STREAM_FAULTS = {
    **FAULTS,
    "lifecycle then cut": (Script((LIFECYCLE,), ends="cut"), 503, "api_error"),
    "lifecycle then stall": (Script((LIFECYCLE,), ends="stall"), 503, "api_error"),
    "lifecycle then end": (Script((LIFECYCLE,)), 500, "api_error"),
    "error event": (Script((LIFECYCLE, f"event: error\ndata: {BUSY}\n\n".encode())), 529, "over"),
}


@pytest.fixture
def routed(smollm2_path: Path, monkeypatch) -> Routed:
    monkeypatch.setenv(KEY_ENV, UPSTREAM_KEY)
    return Routed(smollm2_path, FakeBackend(token_ids=IDS))


@pytest.fixture
async def client(routed: Routed):
    async with routed.client() as client:
        yield client


def cases(faults):
    return pytest.mark.parametrize(
        ("script", "status", "kind"), list(faults.values()), ids=list(faults)
    )


@cases(STREAM_FAULTS)
async def test_a_stream_that_fails_before_content_is_an_http_error(
    routed, client, script, status, kind
):
    routed.upstreams["proxy"].script(script)
    answer = await client.post("/v1/messages", json=claude_body("claude-proxy", stream=True))
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"].startswith(kind)
    assert answer.json()["request_id"] == answer.headers["request-id"]
    (record,) = routed.sink.records
    assert (record.backend, record.num_attempts, record.num_completions) == ("proxy", 1, 0)


@cases(FAULTS)
async def test_a_whole_answer_that_fails_is_an_http_error(routed, client, script, status, kind):
    routed.upstreams["proxy"].script(script)
    answer = await client.post("/v1/messages", json=claude_body("claude-proxy"))
    assert answer.status_code == status
    assert answer.json()["error"]["type"].startswith(kind)


@cases(STREAM_FAULTS)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_client_does_not_notice_a_fallback(
    routed, client, script, status, kind, is_stream
):
    routed.upstreams["proxy"].script(script)
    answer = await client.post("/v1/messages", json=claude_body("sonnet", stream=is_stream))
    assert answer.status_code == 200
    assert b"error" not in answer.content
    assert answer.headers["x-flashray-backend"] == "local"
    assert answer.content.count(b"event: message_start") == int(is_stream)
    assert len(routed.backend.requests) == 1
    (record,) = routed.sink.records
    assert (record.backend, record.num_attempts, record.is_exact) == ("local", 1, True)
    assert record.completion_tokens == len(IDS)


@cases(STREAM_FAULTS)
async def test_an_openai_client_hears_of_it_in_its_own_dialect(
    routed, client, script, status, kind
):
    routed.upstreams["proxy"].script(script)
    body = gpt_body("claude-proxy", stream=True)
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("end", ["cut", "stall", "clean"])
async def test_a_stream_that_fails_after_content_ends_in_one_error_event(routed, client, end):
    half = TEXT[: TEXT.index(b"of France")]
    routed.upstreams["proxy"].script(Script((half,), ends=end))
    answer = await client.post("/v1/messages", json=claude_body("sonnet", stream=True))
    assert answer.status_code == 200
    events = EventDecoder().decode(answer.content)
    kinds = [event.event for event in events]
    assert kinds.count("error") == 1
    assert kinds[-1] == "error"
    good = answer.content[: answer.content.index(b"event: error")]
    assert half.startswith(good)
    assert good.endswith(b"\n\n")
    assert b'" is the capital"' in good
    (record,) = routed.sink.records
    assert (record.backend, record.error_code, record.is_exact) == ("proxy", "api_error", False)
    assert record.prompt_tokens == 35
    assert record.completion_tokens >= 5
    assert routed.backend.requests == []


async def test_an_error_event_after_content_is_the_last_word(routed, client):
    said = content("anthropic_late_error")
    cut = said.index(b"event: error")
    routed.upstreams["proxy"].script(Script((said[:cut], said[cut:])))
    answer = await client.post("/v1/messages", json=claude_body("claude-proxy", stream=True))
    assert answer.content == said
    (record,) = routed.sink.records
    assert record.error_code == "overloaded_error"


async def test_garbage_after_content_is_not_passed_on(routed, client):
    head = TEXT[: TEXT.index(b"event: content_block_stop")]
    routed.upstreams["proxy"].script(Script((head, b"data: <html>\n\n")))
    answer = await client.post("/v1/messages", json=claude_body("claude-proxy", stream=True))
    assert answer.content.startswith(head)
    assert b"html" not in answer.content
    assert answer.content.count(b"event: error") == 1


@pytest.mark.parametrize("status", [400, 404, 408, 409, 413, 422])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_the_caller_did_wrong_is_told_in_the_upstreams_words(
    routed, client, status, is_stream
):
    said = b'{ "type":"error", "error":{"message":"no \\u00e9","type":"odd_error"}, "x":1.0 }'
    routed.upstreams["proxy"].script(refusal(status, said))
    answer = await client.post("/v1/messages", json=claude_body("safe", stream=is_stream))
    assert (answer.status_code, answer.content) == (status, said)
    assert routed.backend.requests == []
    assert not routed.pool.breakers["proxy"].is_open


@pytest.mark.parametrize(
    ("status", "expected", "code"), [(400, 400, None), (404, 404, "not_found"), (422, 400, None)]
)
async def test_and_translated_for_the_other_dialect(routed, client, status, expected, code):
    routed.upstreams["proxy"].script(refusal(status, b'{"error":{"message":"max_tokens: bad"}}'))
    answer = await client.post("/v1/chat/completions", json=gpt_body("claude-proxy"))
    assert answer.status_code == expected
    assert answer.json()["error"]["message"] == "max_tokens: bad"
    assert answer.json()["error"]["code"] == code


async def test_a_short_wait_is_waited_for_once(routed, client):
    busy = refusal(429, LIMITED.encode(), retry_after="0.05")
    routed.upstreams["proxy"].script(busy, whole("anthropic_whole.json"))
    answer = await client.post("/v1/messages", json=claude_body("claude-proxy"))
    assert answer.status_code == 200
    assert len(routed.upstreams["proxy"].seen) == 2
    routed.upstreams["proxy"].script(busy, busy, whole("anthropic_whole.json"))
    answer = await client.post("/v1/messages", json=claude_body("claude-proxy"))
    assert answer.status_code == 429
    assert len(routed.upstreams["proxy"].seen) == 4


async def test_a_long_wait_is_told_and_bounded(routed, client):
    routed.upstreams["proxy"].script(refusal(429, LIMITED.encode(), retry_after="864000"))
    answer = await client.post("/v1/messages", json=claude_body("claude-proxy"))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "60")
    assert len(routed.upstreams["proxy"].seen) == 1


async def test_at_most_two_upstream_attempts(routed, client):
    for upstream in routed.upstreams.values():
        upstream.default = refusal(503)
    answer = await client.post("/v1/messages", json=claude_body("twice"))
    assert answer.status_code == 503
    assert [len(up.seen) for up in routed.upstreams.values()] == [0, 1, 1]


async def test_the_second_target_may_be_an_upstream(routed, client):
    routed.upstreams["proxy"].script(refusal(503))
    routed.upstreams["gpt"].script(stream("openai_text"))
    answer = await client.post("/v1/messages", json=claude_body("twice"))
    assert answer.json()["content"] == [{"type": "text", "text": "Paris is the capital of France."}]
    assert routed.sink.records[0].num_attempts == 2


async def test_three_failures_open_the_breaker(routed, client):
    routed.upstreams["proxy"].default = refusal(500)
    for _ in range(5):
        answer = await client.post("/v1/messages", json=claude_body("claude-proxy"))
    assert len(routed.upstreams["proxy"].seen) == 3
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    answer = await client.post("/v1/messages", json=claude_body("safe"))
    assert answer.headers["x-flashray-backend"] == "local"
    metrics = (await client.get("/metrics")).text
    assert 'upstream_requests_total{backend="proxy",outcome="failed"} 3.0' in metrics
    assert "flashray:fallbacks_total 1.0" in metrics


async def test_a_fallback_that_cannot_take_the_request_leaves_the_first_failure(routed, client):
    routed.upstreams["proxy"].script(refusal(503))
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    answer = await client.post("/v1/messages", json=claude_body("safe", tools=tools))
    assert answer.status_code == 503
    assert "proxy" in answer.json()["error"]["message"]


@pytest.mark.parametrize("ends", ["stall", "cut"])
async def test_a_silence_is_bridged_with_comments_and_can_still_be_mended(
    smollm2_path: Path, monkeypatch, ends
):
    monkeypatch.setenv(KEY_ENV, UPSTREAM_KEY)
    routed = Routed(smollm2_path, FakeBackend(token_ids=IDS), keep_alive_s=0.02)
    slow = Script((LIFECYCLE, b": still here\n\n", b": and here\n\n"), ends=ends, delay_s=0.03)
    async with routed.client() as client:
        for upstream in (slow, stream("anthropic_text", delay_s=0.05)):
            routed.upstreams["proxy"].script(upstream)
            answer = await client.post("/v1/messages", json=claude_body("safe", stream=True))
            assert answer.status_code == 200
            assert answer.content.startswith(b": ka\n")
            assert b"event: error" not in answer.content
            assert answer.content.count(b"event: message_start") == 1
            assert answer.content.replace(b": ka\n", b"").endswith(b"\n\n")
        assert answer.content.replace(b": ka\n", b"") == TEXT
        routed.upstreams["proxy"].script(slow)
        body = claude_body("claude-proxy", stream=True)
        answer = await client.post("/v1/messages", json=body)
    events = EventDecoder().decode(answer.content)
    assert [event.event for event in events] == ["error"]


@pytest.mark.parametrize("ends", ["cut", "stall", "refuse"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_faults_on_a_real_connection(routed, client, ends, is_stream):
    upstream = routed.upstreams["proxy"]
    with upstream.served() as url:
        settings = UpstreamSettings(
            "proxy", "proxy", url, stall_timeout_s=0.2, answer_timeout_s=0.2
        )
        routed.pool.upstreams["proxy"] = ProxyUpstream(settings)
        for chunks in ((), (LIFECYCLE,), (TEXT[: TEXT.index(b"of France")],)):
            upstream.script(Script(chunks, ends=ends))
            body = claude_body("safe", stream=is_stream)
            answer = await client.post("/v1/messages", json=body)
            assert answer.status_code == 200
            has_content = is_stream and b"capital" in b"".join(chunks) and ends != "refuse"
            assert answer.content.count(b"event: error") == int(has_content)
            assert answer.headers["x-flashray-backend"] == ("proxy" if has_content else "local")
            routed.pool.breakers["proxy"].succeeded()
        await routed.pool.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed one of 127.0.0.1; its key lies beside it."""
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subject = ["-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "ca.pem")]
    command = ["openssl", "req", "-x509", *options, *subject, *files]
    subprocess.run(command, check=True, capture_output=True)
    return tmp_path / "ca.pem"


async def test_a_gateway_with_a_ca_of_its_own(routed, client, certificate: Path, tmp_path: Path):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    with routed.upstreams["proxy"].served(context) as url:
        for ca_file, status in ((None, 503), (certificate, 200)):
            settings = UpstreamSettings("proxy", "proxy", url, ca_file=ca_file)
            routed.pool.upstreams["proxy"] = ProxyUpstream(settings)
            body = claude_body("claude-proxy", stream=True)
            answer = await client.post("/v1/messages", json=body)
            assert answer.status_code == status
            await routed.pool.upstreams["proxy"].close()
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ValueError, match=r"empty\.pem: expected certificates in PEM"):
        ProxyUpstream(UpstreamSettings("p", "proxy", url, ca_file=tmp_path / "empty.pem"))
