"""Four replicas behind one handle, two routers: prefixes are found, readers find their generation,
and a death ends what ran there and nothing else."""

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from benchmarks.routing.driver import RouterProcess
from deployments.config import EngineSettings
from deployments.local_backend import LocalBackend
from deployments.replica_router import PUBLICATION_PERIOD_S
from router.errors import BackendError, BackendUnavailable, NotFound
from router.generation import GenerationRequest, SamplingSettings, TokenEvent, Usage
from tests.fakes.checkpoint import tiny_checkpoint
from tests.serve.conftest import engine_handle

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="package")]

NUM_REPLICAS = 4
BLOCK_SIZE = 64
LEASE_S = 5.0
NAME = "replicas"


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def engines_app(app, tmp_path_factory) -> AsyncIterator[str]:
    from ray import serve

    from deployments.flash_engine import engine_deployment

    folder = tmp_path_factory.mktemp("replicas") / "tiny"
    tiny_checkpoint(folder, torch.float32, max_position_embeddings=4096)
    settings = EngineSettings(
        num_replicas=NUM_REPLICAS, kv_cache_gib=0.02, lease_s=LEASE_S, gpus_per_rank=0.5
    )
    deployment = engine_deployment(str(folder), settings)
    await asyncio.to_thread(serve.run, deployment, name=NAME, route_prefix=None)
    yield NAME
    await asyncio.to_thread(serve.delete, NAME)


@pytest.fixture
def engines(engines_app) -> Any:
    return engine_handle(engines_app)


@pytest.fixture
def backend(engines) -> LocalBackend:
    return LocalBackend(engines, LEASE_S)


@pytest.fixture
def other_backend(engines) -> LocalBackend:
    """As in another router process: it remembers nothing of what the first one did."""
    return LocalBackend(engines, LEASE_S)


def request(prompt: tuple[int, ...], max_tokens: int = 4) -> GenerationRequest:
    sampling = SamplingSettings(max_tokens=max_tokens, temperature=0.0)
    return GenerationRequest(uuid.uuid4().hex, "tiny", prompt, sampling)


def prompt_of(seed: int, num_tokens: int) -> tuple[int, ...]:
    chosen = random.Random(seed)
    return tuple(chosen.randrange(1, 256) for _ in range(num_tokens))


async def read(backend: LocalBackend, request_id: str, after_index: int = 0) -> list[TokenEvent]:
    return [event async for batch in backend.subscribe(request_id, after_index) for event in batch]


async def ask(backend: LocalBackend, prompt: tuple[int, ...]) -> Usage:
    asked = request(prompt)
    await backend.submit(asked)
    events = await read(backend, asked.request_id)
    await backend.acknowledge([asked.request_id])
    return events[-1].usage


async def replica_of(engines: Any, request_id: str) -> str:
    tags = await engines.broadcast("locate", request_id).results_async()
    (tag,) = [tag for tag in tags if tag is not None]
    return tag


async def test_a_prefix_is_found_again_wherever_it_is(backend):
    """Six groups of ten requests: all that an endless single cache would give, but for the copies
    that bounded load makes."""
    before = await backend.status()
    prefixes = [prompt_of(group, 8 * BLOCK_SIZE) for group in range(6)]
    usages = [await ask(backend, prefix + prompt_of(99, 7)) for prefix in prefixes]
    assert sum(usage.cached_tokens for usage in usages) == 0
    later = [(*prefixes[n % 6], *prompt_of(n, 20)) for n in range(54)]
    usages = await run_at_once(backend, later, 8)
    oracle = len(later) * 8 * BLOCK_SIZE
    assert sum(usage.cached_tokens for usage in usages) >= 0.7 * oracle
    after = await backend.status()
    cached = after.cached_tokens_total - before.cached_tokens_total
    assert cached == sum(usage.cached_tokens for usage in usages)
    assert after.num_free_blocks == after.num_blocks


async def run_at_once(
    backend: LocalBackend, prompts: list[tuple[int, ...]], num_at_once: int
) -> list[Usage]:
    places = asyncio.Semaphore(num_at_once)

    async def one(prompt: tuple[int, ...]) -> Usage:
        async with places:
            return await ask(backend, prompt)

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def test_another_router_process_learns_where_prefixes_are(engines, backend):
    import ray

    router = ray.remote(num_cpus=0.1)(RouterProcess).remote(NAME)
    await router.statuses.remote()
    prefixes = [prompt_of(700 + group, 8 * BLOCK_SIZE) for group in range(6)]
    for prefix in prefixes:
        await ask(backend, prefix + prompt_of(99, 7))
    await asyncio.sleep(3 * PUBLICATION_PERIOD_S)
    later = [request(prefix + prompt_of(98, 7)) for prefix in prefixes]
    usages = await router.ask_all.remote(later, 1)
    assert [usage.cached_tokens for usage in usages] == [8 * BLOCK_SIZE] * 6


async def test_requests_without_a_common_prefix_use_every_replica(engines, backend):
    asked = [request(prompt_of(1000 + n, 100), max_tokens=600) for n in range(16)]
    await asyncio.gather(*(backend.submit(each) for each in asked))
    tags = Counter([await replica_of(engines, each.request_id) for each in asked])
    await asyncio.gather(*(backend.abort(each.request_id) for each in asked))
    await backend.acknowledge([each.request_id for each in asked])
    assert len(tags) == NUM_REPLICAS
    assert max(tags.values()) <= 6


async def test_every_reader_finds_its_generation_from_any_router(backend, other_backend):
    asked = [request(prompt_of(n, 70), max_tokens=40) for n in range(20)]
    await asyncio.gather(*(backend.submit(each) for each in asked))
    whole = await asyncio.gather(*(read(backend, each.request_id) for each in asked))
    tails = await asyncio.gather(*(read(other_backend, each.request_id, 13) for each in asked))
    for events, tail in zip(whole, tails, strict=True):
        assert tokens_of(tail) == tokens_of(events)[13:]
        assert len(tokens_of(events)) == events[-1].usage.completion_tokens
    await other_backend.acknowledge([each.request_id for each in asked])


async def test_any_router_aborts_and_nothing_is_left(backend, other_backend):
    asked = [request(prompt_of(n, 70), max_tokens=3000) for n in range(12)]
    await asyncio.gather(*(backend.submit(each) for each in asked))
    aborts = [
        (other_backend, backend)[n % 2].abort(each.request_id) for n, each in enumerate(asked)
    ]
    usages = await asyncio.gather(*aborts)
    assert [usage.prompt_tokens for usage in usages] == [70] * 12
    assert await backend.abort("nobody's") is None
    await other_backend.acknowledge([each.request_id for each in asked])
    status = await backend.status()
    assert status.num_running + status.num_waiting == 0
    assert status.num_free_blocks == status.num_blocks
    assert status.num_unaccounted == 0


async def test_an_unknown_generation_is_not_found_anywhere(backend):
    with pytest.raises(NotFound):
        await read(backend, "nobody's")


async def test_the_death_of_a_replica_ends_its_generations_and_no_other(engines, backend):
    rank_pids = await engines.broadcast("rank_pids").results_async()
    asked = [request(prompt_of(500 + n, 70), max_tokens=1500) for n in range(8)]
    await asyncio.gather(*(backend.submit(each) for each in asked))
    readers = [asyncio.create_task(read(backend, each.request_id)) for each in asked]
    homes = await asyncio.gather(*(replica_of(engines, each.request_id) for each in asked))
    psutil.Process(rank_pids[0][0]).kill()
    async with asyncio.timeout(60):
        ends = await asyncio.gather(*readers, return_exceptions=True)
    died = {home for home, end in zip(homes, ends, strict=True) if isinstance(end, Exception)}
    assert len(died) == 1 < len(set(homes))
    for home, end in zip(homes, ends, strict=True):
        if home in died:
            assert isinstance(end, BackendUnavailable | BackendError)
        else:
            assert end[-1].usage.completion_tokens == 1500
    new = [ask(backend, prompt_of(600 + n, 70)) for n in range(8)]  # the dead one is still listed
    assert [usage.completion_tokens for usage in await asyncio.gather(*new)] == [4] * 8
    await until_replaced(engines, rank_pids)
    lost = asked[homes.index(died.pop())].request_id
    with pytest.raises(BackendUnavailable):
        await read(backend, lost)
    assert await backend.abort(lost) is None
    await backend.acknowledge([each.request_id for each in asked])
    assert (await ask(backend, prompt_of(7, 70))).completion_tokens == 4


async def until_replaced(engines: Any, rank_pids: list[list[int]]) -> None:
    """The router does not know the dead replica any more."""
    async with asyncio.timeout(30):
        while rank_pids[0] in await engines.broadcast("rank_pids").results_async():  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]
