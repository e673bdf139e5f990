"""Sender, script and mock of the router benchmark, against each other on loopback."""

import json
from pathlib import Path

import httpx
import pytest

from benchmarks.errors import MeasurementFailed
from benchmarks.load import ExchangeFailed, LoadResult
from benchmarks.router import saturation
from benchmarks.router.added_latency import CASES, _rows
from benchmarks.router.exchange import Exchange
from benchmarks.router.mock_upstream import upstream
from benchmarks.router.script import (
    ANSWER,
    HEADERS,
    PATHS,
    UPSTREAM_LATENCY_MS,
    answer_body,
    request_body,
)
from benchmarks.router.scripted_backend import ScriptedBackend
from router.app import create_app
from router.catalog import ServedModel
from router.config import RouterConfig
from router.identity import KeyRing, hash_key
from router.protocols.anthropic.parse import parse_messages
from router.protocols.openai.parse import parse_chat
from tests.fakes.router import KEY, MODEL, catalog, served

DIALECTS = ("chat", "messages")


@pytest.fixture(scope="module")
def mock_port():
    with served(upstream) as url:
        yield int(url.rsplit(":", 1)[1])


def exchange(port: int, dialect: str, expected: bytes = b"lazy dog") -> Exchange:
    body = request_body(dialect, "any", 300)
    return Exchange(port, PATHS[dialect], body, HEADERS[dialect], expected)


@pytest.mark.parametrize("num_bytes", [300, 76_000])
def test_bodies_have_their_size_and_are_valid_requests(num_bytes: int):
    for dialect in DIALECTS:
        assert len(request_body(dialect, "scripted", num_bytes)) == num_bytes
    assert parse_chat(request_body("chat", "scripted", num_bytes)).model == "scripted"
    messages = parse_messages(request_body("messages", "scripted", num_bytes), "2023-06-01")
    assert messages.max_tokens == 64


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_sender_reads_the_mock_on_one_connection(mock_port: int, dialect: str):
    sender = exchange(mock_port, dialect)
    for number in range(3):
        await sender.send(number)
    assert len(sender._idle) == 1
    await sender.close()


async def test_the_mock_takes_its_latency(mock_port: int):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{mock_port}") as client:
        answer = await client.post(PATHS["chat"], content=request_body("chat", "any", 300))
    assert answer.json() == json.loads(answer_body("chat"))
    assert answer.elapsed.total_seconds() * 1e3 >= UPSTREAM_LATENCY_MS


async def test_another_answer_is_a_failure(mock_port: int):
    sender = exchange(mock_port, "chat", expected=b"absent")
    with pytest.raises(ExchangeFailed, match="200"):
        await sender.send(0)
    await sender.close()


async def test_a_connection_that_was_idle_for_long_is_not_used_again(
    mock_port: int, monkeypatch: pytest.MonkeyPatch
):
    sender = exchange(mock_port, "chat")
    await sender.send(0)
    ((_, (_, first)),) = sender._idle
    monkeypatch.setattr("benchmarks.router.exchange.MAX_IDLE_S", 0.0)
    await sender.send(1)
    ((_, (_, second)),) = sender._idle
    assert first.is_closing()
    assert second is not first
    await sender.close()


async def test_an_error_status_is_a_failure(smollm2_path: Path):
    app = create_app(
        catalog=catalog(smollm2_path),
        backend=ScriptedBackend([1]),
        keys=KeyRing({}),
        config=RouterConfig(),
    )
    with served(app) as url:
        sender = exchange(int(url.rsplit(":", 1)[1]), "messages")
        with pytest.raises(ExchangeFailed, match="401"):
            await sender.send(0)
        await sender.close()


async def test_the_sender_reads_chunked_answers():
    async def chunked(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"lazy", b" ", b"dog"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    with served(chunked) as url:
        sender = exchange(int(url.rsplit(":", 1)[1]), "chat")
        await sender.send(0)
        await sender.send(1)
        assert len(sender._idle) == 1
        await sender.close()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_our_router_answers_the_script(smollm2_path: Path, dialect: str):
    models: ServedModel = catalog(smollm2_path).resolve(MODEL)
    backend = ScriptedBackend([*models.tokenizer.encode(ANSWER), 2])
    app = create_app(
        catalog=catalog(smollm2_path),
        backend=backend,
        keys=KeyRing({hash_key(KEY): "red"}),
        config=RouterConfig(),
    )
    transport = httpx.ASGITransport(app)
    headers = {**HEADERS[dialect], "authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = request_body(dialect, MODEL, 300)
        answer = await client.post(PATHS[dialect], content=body, headers=headers)
    assert answer.status_code == 200
    assert ANSWER in answer.text
    assert (await backend.status()).num_running == 0  # acknowledged, so a long run stays small


def result(latencies_ms: list[float], num_offered: int = 100) -> LoadResult:
    return LoadResult(num_offered, 1.0, latencies_ms)


def test_ours_is_charged_its_http_exchange_and_the_peer_is_not():
    p50, p99, mock = _rows(CASES[0], [result([26.0] * 100)], [result([40.0] * 100)], 23.0)
    assert (p50.case, p50.ours, p50.peer_value, p50.floor) == ("added_p50_60rps", 6.0, 17.0, 8)
    assert (p99.case, p99.floor) == ("added_p99_60rps", 25)
    assert (mock.ours, mock.peer) == (23.0, None)


def test_of_repeats_the_median_counts():
    own = [result([value] * 100) for value in (25.0, 90.0, 26.0)]
    p50, *_ = _rows(CASES[0], own, [result([40.0] * 100)], 23.0)
    assert p50.ours == 6.0


@pytest.mark.parametrize(
    ("latencies_ms", "holds"),
    [([5.0] * 95, True), ([5.0] * 94, False), ([5.0] * 90 + [1500.0] * 10, False)],
)
def test_keeping_up_is_a_share_and_a_tail(latencies_ms: list[float], holds: bool):
    assert saturation.keeps_up(result(latencies_ms)) is holds


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [(200.0, 170.0), (100.0, 100.0), (10.0, 10.0), (1000.0, 700.0), (0.0, 0.0)],
)
async def test_the_ladder_ends_at_the_first_rung_that_is_not_held(
    monkeypatch: pytest.MonkeyPatch, capacity: float, expected: float
):
    asked: list[float] = []

    async def offer(_gateway, _dialect, _num_bytes, rate_per_s, window_s, timeout_s):
        asked.append(rate_per_s)
        num_served = int(min(rate_per_s, capacity) * window_s)
        return LoadResult(int(rate_per_s * window_s), window_s, [5.0] * num_served)

    monkeypatch.setattr(saturation, "offer", offer)
    gateway = saturation.Gateway("ours", 1)

    held = await saturation._climb(gateway, "chat", saturation.OUR_LADDER, lambda _message: None)

    assert held == expected
    rungs = [rate for rate in asked if rate != saturation.RECOVERY_PER_S]
    assert rungs == list(saturation.OUR_LADDER[: len(rungs)])


async def test_an_overloaded_gateway_is_given_time_before_its_next_ladder(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[float] = []

    async def offer(_gateway, _dialect, _num_bytes, rate_per_s, window_s, timeout_s):
        asked.append(rate_per_s)
        num_offered = int(rate_per_s * window_s)
        return LoadResult(num_offered, window_s, [5.0] * (num_offered if len(asked) > 2 else 0))

    monkeypatch.setattr(saturation, "offer", offer)

    held = await saturation._climb(
        saturation.Gateway("ours", 1), "chat", [40, 60], lambda _message: None
    )

    assert held == 60
    assert asked == [*[saturation.RECOVERY_PER_S] * 3, 40, 60]


def test_nothing_served_at_all_is_said():
    with pytest.raises(MeasurementFailed, match="none of 100"):
        result([]).latency_ms(50)
