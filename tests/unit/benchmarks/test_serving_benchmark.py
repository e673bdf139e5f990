"""The streaming client of the serving benchmark over the real router."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from benchmarks.load import ExchangeFailed, LoadResult
from benchmarks.results import Row
from benchmarks.serving.stream import StreamTiming, timed_stream
from benchmarks.serving.workload import HEADERS, Streams, request_body, stream_rows
from tests.fakes.backend import FakeBackend
from tests.fakes.router import KEY, MODEL, catalog, router_app

TEXT = "one two three four five six seven eight nine"


@pytest.fixture
def token_ids(smollm2_path: Path) -> tuple[int, ...]:
    return (*catalog(smollm2_path).resolve(MODEL).tokenizer.encode(TEXT), 2)


def client_of(folder: Path, backend: FakeBackend) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(router_app(folder, backend)),
        base_url="http://test",
        headers={"authorization": f"Bearer {KEY}"},
    )


async def test_a_stream_is_timed_and_counted(smollm2_path: Path, token_ids: tuple[int, ...]):
    backend = FakeBackend(token_ids, tokens_per_event=3)
    async with client_of(smollm2_path, backend) as client:
        timing = await timed_stream(client, request_body(MODEL, 1, 1), HEADERS)
    assert timing.num_tokens == len(token_ids)
    num_shown = len(token_ids) - 1  # all but the end of turn
    assert len(timing.gaps_ms) == -(-num_shown // 3) - 1
    assert all(gap >= 0 for gap in timing.gaps_ms)
    assert 0 < timing.ttft_ms <= timing.duration_ms


async def test_a_refusal_is_a_failure(smollm2_path: Path):
    async with client_of(smollm2_path, FakeBackend()) as client:
        with pytest.raises(ExchangeFailed, match="404"):
            await timed_stream(client, request_body("absent", 1, 1), HEADERS)


async def test_a_stream_that_breaks_off_is_a_failure():
    def cut(_request: httpx.Request) -> httpx.Response:
        delta = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}
        return httpx.Response(200, text=f"data: {json.dumps(delta)}\n\n")

    async with httpx.AsyncClient(
        transport=httpx.MockTransport(cut), base_url="http://test"
    ) as client:
        with pytest.raises(ExchangeFailed, match="ended: False"):
            await timed_stream(client, {}, {})


async def test_a_closed_load_gives_every_number(smollm2_path: Path, token_ids: tuple[int, ...]):
    async with client_of(smollm2_path, FakeBackend(token_ids)) as client:
        streams = Streams("c2", client, MODEL, seed=1)
        rows = {row.case: row for row in await streams.closed(concurrency=2, num_requests=6)}
    assert set(rows) == {
        *(f"{case}_c2_p{percent}" for case in ("ttft", "itl") for percent in (50, 95, 99)),
        "tpot_c2_mean",
        "tok_s_c2",
        "goodput_c2",
        "failed_c2",
    }
    assert rows["goodput_c2"].ours == 1
    assert rows["failed_c2"].ours == 0
    assert len(streams.timings) == 6


async def test_an_open_load_sends_what_the_schedule_says(
    smollm2_path: Path, token_ids: tuple[int, ...]
):
    backend = FakeBackend(token_ids)
    async with client_of(smollm2_path, backend) as client:
        await asyncio.wait_for(Streams("open", client, MODEL, seed=3).open(50, 0.3), 20)
    prompts = {request.prompt_token_ids for request in backend.requests}
    assert len(prompts) == len(backend.requests) > 5


def test_numbers_of_streams():
    timings = [
        StreamTiming(100, (10, 20), num_tokens=3, duration_ms=140),
        StreamTiming(3000, (40,), num_tokens=2, duration_ms=3050),
        StreamTiming(50, (), num_tokens=1, duration_ms=50),
    ]
    result = LoadResult(4, 2.0, [140, 3050, 50], ["timed out"])

    rows: dict[str, Row] = {row.case: row for row in stream_rows("x", timings, result)}

    assert rows["ttft_x_p50"].ours == 100
    assert rows["itl_x_p50"].ours == 20
    assert rows["tpot_x_mean"].ours == pytest.approx((20 + 50) / 2)
    assert rows["tok_s_x"].ours == 3
    assert rows["goodput_x"].ours == 0.5  # one was late, one never came
    assert rows["failed_x"].ours == 0.25
    assert rows["failed_x"].meets_floor is False


def test_requests_repeat_for_a_seed_and_differ_by_number():
    assert request_body("m", 1, 1) == request_body("m", 1, 1)
    assert len({json.dumps(request_body("m", 1, number)) for number in range(50)}) == 50
