"""Every request ends in one record and one settlement, whichever way it ended."""

import asyncio
import contextlib
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from router.accounting import Accounting
from router.app import create_app
from router.audit import JsonlSink, read_audit, total_tokens
from router.backends.base import OrphanedGeneration
from router.config import RouterConfig
from router.errors import BackendError
from router.generation import FinishReason, Usage
from router.identity import KeyRing, hash_key
from router.limits.limiter import Limiter
from router.limits.policy import Limits
from router.teams import Team
from tests.fakes.audit import MemorySink
from tests.fakes.backend import FakeBackend
from tests.fakes.router import KEY, MODEL, catalog

IDS = (504, 3575, 282, 4649, 314, 2)
RED = Team("red", limits=Limits(requests_per_minute=5, tokens_per_minute=10_000))
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(token_ids=IDS, tokens_per_event=2, cached_tokens=5)


@pytest.fixture
def sink() -> MemorySink:
    return MemorySink()


@pytest.fixture
def app(smollm2_path: Path, backend: FakeBackend, sink: MemorySink, valkey: Redis):
    return create_app(
        catalog=catalog(smollm2_path),
        backend=backend,
        keys=KeyRing({hash_key(KEY): "red", hash_key("sk-blue"): "blue"}),
        config=RouterConfig(max_running_requests=1),
        teams=[RED, Team("blue", models=frozenset({"other"}))],
        sink=sink,
        limiter=Limiter(valkey),
    )


@pytest.fixture
async def client(app):
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app),
        base_url="http://router",
        headers={"x-api-key": KEY, "anthropic-version": "2023-06-01"},
    ) as client:
        yield client


def body(**changes):
    return {"model": MODEL, "max_tokens": 50, "messages": HELLO, **changes}


async def settled(valkey: Redis, team: str = "red") -> int:
    return int(await valkey.hget(f"flashray:{{{team}}}:buckets", "settled_tokens") or 0)


async def leases(valkey: Redis, team: str = "red") -> int:
    return await valkey.zcard(f"flashray:{{{team}}}:leases")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion(client, sink, backend, valkey, stream: bool):
    answer = await client.post("/v1/messages", json=body(stream=stream))
    (record,) = sink.records
    prompt = len(backend.requests[0].prompt_token_ids)
    assert record.request_id == answer.headers["request-id"]
    assert (record.team, record.model, record.status) == ("red", MODEL, 200)
    assert (record.prompt_tokens, record.cached_tokens) == (prompt, 5)
    assert record.completion_tokens == len(IDS)
    assert record.finish_reasons == ("stop_token",)
    assert record.is_exact
    assert record.is_stream is stream
    assert 0 <= record.ttft_ms <= record.duration_ms
    assert await settled(valkey) == prompt + len(IDS)
    assert await leases(valkey) == 0
    assert backend.acknowledged == [record.request_id]


async def test_several_completions_are_one_record(client, sink, backend, valkey):
    await client.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "n": 3})
    (record,) = sink.records
    assert record.num_completions == 3
    assert record.completion_tokens == 3 * len(IDS)
    assert await settled(valkey) == record.prompt_tokens + record.completion_tokens
    assert len(backend.acknowledged) == 3


@pytest.mark.parametrize(
    ("changes", "headers", "status", "code"),
    [
        ({"max_tokens": -1}, {}, 400, "invalid_request_error"),
        ({"model": "gpt-9"}, {}, 404, "not_found_error"),
        ({}, {"x-api-key": "wrong"}, 401, "authentication_error"),
        ({}, {"x-api-key": "sk-blue"}, 403, "permission_error"),
    ],
)
async def test_refusals_are_recorded_and_cost_nothing(
    client, sink, valkey, changes, headers, status: int, code: str
):
    await client.post("/v1/messages", json=body(**changes), headers=headers)
    (record,) = sink.records
    assert (record.status, record.error_code) == (status, code)
    assert total_tokens([record]) == (0, 0, 0)
    assert await settled(valkey) == 0


async def test_a_team_over_its_limit_is_told_when(client, sink, backend):
    answers = [await client.post("/v1/messages", json=body(max_tokens=3)) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    remaining = [answer.headers["anthropic-ratelimit-requests-remaining"] for answer in answers]
    assert remaining == ["4", "3", "2", "1", "0", "0"]
    assert int(answers[5].headers["retry-after"]) >= 1
    assert answers[5].json()["error"]["type"] == "rate_limit_error"
    assert len(backend.requests) == 5
    assert sink.records[5].error_code == "rate_limit_error"
    openai = {"model": MODEL, "messages": HELLO}
    refused = await client.post("/v1/chat/completions", json=openai)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["x-ratelimit-limit-requests"] == "5"


async def test_a_disconnect_is_billed_what_was_made(app, sink, backend, valkey):
    backend.gate = asyncio.Semaphore(2)
    headers = [(b"x-api-key", KEY.encode()), (b"anthropic-version", b"2023-06-01")]
    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": headers}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "raw_path": b"/v1/messages"}
    content = httpx.Request("POST", "http://r", json=body(stream=True)).content
    seen = asyncio.Event()
    requests = iter([{"type": "http.request", "body": content, "more_body": False}])

    async def receive():
        if (message := next(requests, None)) is not None:
            return message
        await seen.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body" and b"text_delta" in message["body"]:
            seen.set()

    await app(scope, receive, send)
    (record,) = sink.records
    assert record.finish_reasons == ("abort",)
    assert record.is_exact
    assert record.completion_tokens == backend.num_sent[record.request_id] > 0
    assert await settled(valkey) == record.prompt_tokens + record.completion_tokens
    assert await leases(valkey) == 0


async def test_a_broken_generation_is_inexact_and_says_so(client, sink, backend, valkey):
    backend.error, backend.fail_at = BackendError("broke"), 1
    backend.loses_usage = True
    await client.post("/v1/messages", json=body(stream=True))
    (record,) = sink.records
    assert not record.is_exact
    assert record.error_code == "api_error"
    assert total_tokens([record]) == (0, 0, 0)
    assert await leases(valkey) == 0


async def test_a_full_queue_is_529_and_settled(smollm2_path, backend, sink, valkey):
    team = Team("red", limits=Limits(max_queued=1))
    backend.gate = asyncio.Semaphore(0)
    app = create_app(
        catalog=catalog(smollm2_path),
        backend=backend,
        keys=KeyRing({hash_key(KEY): "red"}),
        config=RouterConfig(max_running_requests=1),
        teams=[team],
        sink=sink,
        limiter=Limiter(valkey),
    )
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://r", headers=headers
    ) as client:
        waiting = [asyncio.create_task(client.post("/v1/messages", json=body())) for _ in range(2)]
        await asyncio.sleep(0.3)
        refused = await client.post("/v1/messages", json=body())
        for _ in range(20):
            backend.gate.release()
        answers = await asyncio.gather(*waiting)
    assert refused.status_code == 529
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in answers] == [200, 200]
    assert await leases(valkey) == 0


async def test_a_full_disk_stops_no_request(client, sink, caplog):
    sink.broken = True
    assert (await client.post("/v1/messages", json=body())).status_code == 200
    assert "audit record lost" in caplog.text


def orphan(request_id: str) -> OrphanedGeneration:
    return OrphanedGeneration(request_id, MODEL, "red", "k", Usage(40, 0, 7), FinishReason.ABORT)


async def test_orphans_are_adopted_once(backend, sink, valkey):
    limiter = Limiter(valkey)
    await limiter.admit("lost", RED, 40, 50)
    backend.orphans = [orphan("lost")]
    accounting = Accounting({"red": RED}, backend, sink, limiter)
    await accounting.adopt_orphans()
    await accounting.adopt_orphans()
    (record,) = sink.records
    assert record.is_orphan
    assert record.completion_tokens == 7
    assert await settled(valkey) == 47
    assert await leases(valkey) == 0
    assert backend.acknowledged == ["lost"]


async def test_a_record_and_an_orphan_of_one_request_count_once(tmp_path: Path, backend, app, sink):
    jsonl = JsonlSink(tmp_path)
    accounting = Accounting({"red": RED}, backend, jsonl, None)
    backend.orphans = [orphan("req_1"), orphan("req_2-1"), orphan("req_3")]
    await accounting.adopt_orphans()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://r") as client:
        await client.post("/v1/messages", json=body(), headers={"x-api-key": "no"})
    (known,) = sink.records
    for request_id in ("req_1", "req_2"):
        jsonl.write(type(known)(**{**_fields(known), "request_id": request_id}))
    with contextlib.closing(jsonl):
        records = {record.request_id: record for record in read_audit(tmp_path)}
    assert records.keys() == {"req_1", "req_2", "req_3"}
    assert [records[f"req_{n}"].is_orphan for n in (1, 2, 3)] == [False, False, True]


def _fields(record) -> dict:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def test_a_line_cut_by_a_crash_is_skipped(tmp_path: Path):
    (tmp_path / "audit-1.jsonl").write_text('{"time": "2026", "request_id": "r", "tea')
    assert list(read_audit(tmp_path)) == []


def test_files_are_for_this_user_only(tmp_path: Path):
    sink = JsonlSink(tmp_path / "audit")
    sink.close()
    (file,) = (tmp_path / "audit").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert (tmp_path / "audit").stat().st_mode & 0o077 == 0
