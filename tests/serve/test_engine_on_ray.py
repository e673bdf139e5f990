"""The engine deployment through Serve handles: streams, disconnects, a second reader, death."""

import asyncio
import contextlib
import os
import random
import signal
import uuid

import anthropic
import httpx
import pytest
from ray.exceptions import RayError

from deployments.local_backend import LocalBackend
from router.backends.base import BackendStatus
from router.errors import BackendUnavailable, InvalidRequest, NotFound
from router.generation import (
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    SamplingSettings,
    Usage,
)
from tests.serve.conftest import KEY

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="package")]


def request(max_tokens: int = 50, grace_s: float = 0.0, prompt_len: int = 40) -> GenerationRequest:
    prompt = tuple(random.randrange(1, 256) for _ in range(prompt_len))
    sampling = SamplingSettings(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(uuid.uuid4().hex, "tiny", prompt, sampling, grace_s=grace_s)


async def read(backend: LocalBackend, request_id: str, after_index: int = 0) -> list[int]:
    return [
        token
        async for events in backend.subscribe(request_id, after_index)
        for event in events
        for token in event.token_ids
    ]


async def until_idle(backend: LocalBackend, timeout_s: float = 1.0) -> BackendStatus:
    async with asyncio.timeout(timeout_s):
        while True:
            status = await backend.status()
            if status.num_running + status.num_waiting == 0:
                return status
            await asyncio.sleep(0.02)


async def until_ready(url: str) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(base_url=url) as client:
        while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.2)


async def read_out(stream) -> None:
    async for _ in stream:
        pass


async def rank_pid_of(engine) -> int:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(RayError):  # of a replica that is gone
                (pid,) = await engine.rank_pids.remote()
                return pid


async def test_one_stream(backend):
    generation = request()
    await backend.submit(generation)
    events = [event async for batch in backend.subscribe(generation.request_id) for event in batch]
    assert sum(len(event.token_ids) for event in events) == 50
    assert events[-1].finish_reason is FinishReason.LENGTH
    assert events[-1].usage == Usage(40, 0, 50)
    assert await backend.abort(generation.request_id) == Usage(40, 0, 50)


async def test_grammars_are_compiled_in_the_rank_and_refused_from_there(backend):
    def asking_for(text: str) -> GenerationRequest:
        sampling = SamplingSettings(
            max_tokens=50, stop_token_ids=(0,), grammar=Grammar(GrammarKind.REGEX, text)
        )
        return GenerationRequest(uuid.uuid4().hex, "tiny", (5, 6, 7), sampling)

    follows = asking_for("(ab){3}")
    await backend.submit(follows)
    with pytest.raises(InvalidRequest, match="cannot be followed: at 1"):
        await backend.submit(asking_for("("))
    a, b, end = 64, 65, 0  # of a vocabulary of bytes that begins with "!"
    assert await read(backend, follows.request_id) == [a, b, a, b, a, b, end]


async def test_refusals_cross_processes_as_themselves(backend):
    with pytest.raises(InvalidRequest, match="4096"):
        await backend.submit(request(max_tokens=5000))
    with pytest.raises(NotFound, match="unknown here or has expired"):
        await read(backend, "nobody")
    assert await backend.abort("nobody") is None


async def test_a_second_subscribe_reads_on_after_the_first_reader_died(backend):
    generation = request(max_tokens=400, grace_s=20.0)
    await backend.submit(generation)
    seen: list[int] = []
    first = backend.subscribe(generation.request_id)
    while len(seen) < 5:
        seen += [token for event in await anext(first) for token in event.token_ids]
    await first.aclose()
    assert (await backend.status()).num_running == 1
    seen += await read(backend, generation.request_id, len(seen))
    again = request(max_tokens=400)
    again = GenerationRequest("again", "tiny", generation.prompt_token_ids, again.sampling)
    await backend.submit(again)
    assert seen == await read(backend, "again")


async def test_sixteen_streams_with_random_disconnects(backend):
    """Freed within 1 s, no block leaked, no event lost, and the engine counts what was reported."""
    before = await until_idle(backend)
    generations = [request(max_tokens=150, prompt_len=20 + 9 * n) for n in range(16)]
    for generation in generations:
        await backend.submit(generation)

    async def run(number: int, generation: GenerationRequest) -> int | None:
        seen = 0
        stream = backend.subscribe(generation.request_id)
        async for events in stream:
            for event in events:
                assert event.index == seen, "an event was lost or doubled"
                seen += len(event.token_ids)
            if number % 2 and seen > random.randrange(60):
                await stream.aclose()
                return None
        return seen

    results = await asyncio.gather(*(run(n, g) for n, g in enumerate(generations)))
    after = await until_idle(backend)
    assert results[::2] == [150] * 8
    assert after.num_free_blocks == after.num_blocks
    usages = [await backend.abort(generation.request_id) for generation in generations]
    made = after.completion_tokens_total - before.completion_tokens_total
    assert made == sum(usage.completion_tokens for usage in usages if usage)


async def test_http_clients_that_leave_free_their_sequences(app, backend):
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    body = {"model": "tiny", "max_tokens": 3000, "stream": True}
    body["messages"] = [{"role": "user", "content": "Go on and on"}]

    async def leave(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/messages", json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            for _ in range(random.randrange(1, 9)):
                await anext(lines)

    async with httpx.AsyncClient(base_url=app.url, timeout=30) as client:
        await asyncio.gather(*(leave(client) for _ in range(8)))
    status = await until_idle(backend)
    assert status.num_free_blocks == status.num_blocks


async def test_a_lease_nobody_renews_runs_out(engine, backend):
    """As after the death of a router replica: a reader that never says it left."""
    generation = request(max_tokens=4000)
    await backend.submit(generation)
    stream = engine.options(stream=True).subscribe.remote(generation.request_id)
    await anext(stream)
    await until_idle(backend, timeout_s=6.0)
    usage = await backend.abort(generation.request_id)
    assert usage is not None
    assert usage.completion_tokens < 4000


async def test_a_dead_rank_is_a_typed_error_and_comes_back(app, engine, backend):
    generation = request(max_tokens=4000)
    await backend.submit(generation)
    stream = backend.subscribe(generation.request_id)
    await anext(stream)
    rank_pid = await rank_pid_of(engine)
    os.kill(rank_pid, signal.SIGKILL)
    with pytest.raises(BackendUnavailable, match="restarted"):
        await asyncio.wait_for(read_out(stream), 60)
    await until_ready(app.url)
    assert await rank_pid_of(engine) != rank_pid
    async with anthropic.AsyncAnthropic(base_url=app.url, api_key=KEY, timeout=30) as sdk:
        message = await sdk.messages.create(
            model="tiny", max_tokens=5, messages=[{"role": "user", "content": "Hello"}]
        )
    assert 1 <= message.usage.output_tokens <= 5
