"""500 requests, a fifth of them abandoned, routers killed on the way: the audit's sum, the engine's
own counters and what the limiter settled are one number."""

import asyncio
import contextlib
import random
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio
from redis.asyncio import Redis

from deployments.local_backend import LocalBackend
from router.audit import read_audit, total_tokens
from tests.serve.conftest import KEY

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="package")]

NUM_REQUESTS = 500
NUM_AT_ONCE = 24
NUM_KILLS = 3
HEADERS = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def valkey(app) -> Redis:
    import ray

    store = ray.get_actor("flashray-limit-store", namespace="flashray")
    async with Redis.from_url(await store.url.remote()) as client:
        yield client


def routers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "Replica:flashray:Router" in process.name() + " ".join(process.cmdline()):
                found.append(process)
    return found


class Client:
    """Sends one request after another; what the server answered does not matter here."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)

    async def run(self, num_requests: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30, headers=HEADERS) as client:
            for _ in range(num_requests):
                with contextlib.suppress(httpx.HTTPError):
                    await self._ask(client)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        text = "word " * self._random.randrange(1, 40)
        body = {
            "model": "tiny",
            "max_tokens": self._random.randrange(0, 60),
            "messages": [{"role": "user", "content": text}],
            "stream": self._random.random() < 0.6,
        }
        leaves = self._random.random() < 0.2
        async with client.stream("POST", "/v1/messages", json=body) as answer:
            async for _ in answer.aiter_bytes():
                if leaves and self._random.random() < 0.5:
                    return


async def kill_routers() -> int:
    killed = 0
    while killed < NUM_KILLS:
        await asyncio.sleep(1.5)
        alive = routers()
        if len(alive) > 1:
            random.choice(alive).kill()
            killed += 1
    return killed


async def test_every_sum_is_the_same(app, backend, valkey, audit_folder: Path):
    before = await backend.status()
    settled_before = await settled_tokens(valkey)
    known = {record.request_id for record in read_audit(audit_folder)}
    clients = [Client(app.url, seed).run(NUM_REQUESTS // NUM_AT_ONCE + 1) for seed in range(24)]
    killing = asyncio.create_task(kill_routers())
    await asyncio.gather(*clients)
    assert await killing == NUM_KILLS
    await until_all_accounted(backend, valkey)

    after = await backend.status()
    records = [r for r in read_audit(audit_folder) if r.request_id not in known]
    prompt, cached, completion = total_tokens(records)
    assert len(records) > NUM_REQUESTS * 0.9
    assert any(record.finish_reasons == ("abort",) for record in records)
    assert prompt == after.prompt_tokens_total - before.prompt_tokens_total
    assert cached == after.cached_tokens_total - before.cached_tokens_total
    assert completion == after.completion_tokens_total - before.completion_tokens_total
    assert await settled_tokens(valkey) - settled_before == prompt + completion
    assert after.num_free_blocks == after.num_blocks


async def until_all_accounted(backend: LocalBackend, valkey: Redis) -> None:
    """The engine is idle, no lease is left, and no generation waits for its accountant."""
    async with asyncio.timeout(90):
        while True:
            status = await backend.status()
            idle = status.num_running + status.num_waiting == 0
            seconds, _ = await valkey.time()
            leases = await valkey.zcount(f"{TEAM}:leases", seconds * 1000, "+inf")
            if idle and not status.num_unaccounted and not leases:
                return
            await asyncio.sleep(0.2)


async def settled_tokens(valkey: Redis) -> int:
    return int(await valkey.hget(f"{TEAM}:buckets", "settled_tokens") or 0)


TEAM = "flashray:{red}"
