"""Engines on Ray with a cold tier: what one has computed another one restores, and the first one
too after its restart, on one rank and on two."""

import asyncio
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from deployments.cold_store import NAME_PREFIX, NAMESPACE, end_cold_stores
from deployments.local_backend import LocalBackend
from router.backends.base import BackendStatus
from router.generation import GenerationRequest, SamplingSettings
from tests.fakes.checkpoint import tiny_checkpoint
from tests.serve.conftest import engine_handle
from tests.serve.test_ranks_on_ray import pids_of, serving

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="package")]

NUM_CACHED_TOKENS = 7 * 64
BLOCK_BYTES = 2 * 2 * 64 * 2 * 8 * 4
COLD = {
    "max_model_len": 512,
    "max_num_sequences": 4,
    "kv_cache_gib": 12 * BLOCK_BYTES / (1 << 30),  # one sequence and a half
    "cold_tier_gib": 1 / 16,
    "cold_tier_chunk_mib": 1,
    "gpus_per_rank": 0,
}
PROMPTS = [
    tuple(random.Random(number).choices(range(1, 256), k=NUM_CACHED_TOKENS + 10))
    for number in range(12)
]


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    cached_tokens: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cold") / "tiny"
    return tiny_checkpoint(folder, torch.float32, max_position_embeddings=512)


@pytest.fixture(scope="module", autouse=True)
def stores(app):
    yield
    end_cold_stores()


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def app_a(app, folder) -> AsyncIterator[str]:
    async with serving(folder, "cold-a", **COLD) as name:
        yield name


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def app_b(app, folder) -> AsyncIterator[str]:
    async with serving(folder, "cold-b", **COLD) as name:
        yield name


@pytest.fixture
def engine_a(app_a) -> Any:
    return engine_handle(app_a)


@pytest.fixture
def engine_b(app_b) -> Any:
    return engine_handle(app_b)


async def ask(handle: Any, prompt: tuple[int, ...], tenant: str = "red") -> Answer:
    backend = LocalBackend(handle, 5.0)
    sampling = SamplingSettings(max_tokens=12, temperature=0.0)
    request = GenerationRequest(uuid.uuid4().hex, "tiny", prompt, sampling, cache_salt=tenant)
    await backend.submit(request)
    events = [event async for batch in backend.subscribe(request.request_id) for event in batch]
    token_ids = tuple(token_id for event in events for token_id in event.token_ids)
    return Answer(token_ids, events[-1].usage.cached_tokens)


async def status_of(handle: Any) -> BackendStatus:
    status = await LocalBackend(handle, 5.0).status()
    assert status.ready
    return status


async def fill(handle: Any) -> list[Answer]:
    """Ask all there is: of each prompt but the last at least six blocks are spilled."""
    answers = [await ask(handle, prompt) for prompt in PROMPTS]
    wanted = 6 * (len(PROMPTS) - 1)
    async with asyncio.timeout(30):
        while (await status_of(handle)).cold_spilled_blocks_total < wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return answers


async def kill_and_await(handle: Any, rank: int = 0) -> None:
    pids = await pids_of(handle)
    os.kill(pids[rank], signal.SIGKILL)
    await pids_of(handle, gone=frozenset(pids))


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def computed(app_a) -> list[Answer]:
    """By engine A, which has never seen any of it."""
    answers = await fill(engine_handle(app_a))
    assert {answer.cached_tokens for answer in answers} == {0}
    return answers


async def test_what_one_replica_computed_another_restores(computed, engine_b):
    before = await status_of(engine_b)
    found = [await ask(engine_b, prompt) for prompt in PROMPTS[:4]]
    after = await status_of(engine_b)
    assert found == [Answer(answer.token_ids, NUM_CACHED_TOKENS) for answer in computed[:4]]
    assert after.cold_restored_blocks_total - before.cold_restored_blocks_total == 4 * 7
    assert after.cold_corrupt_blocks_total == 0


async def test_a_replica_that_was_killed_restores_what_it_had_computed(computed, engine_a):
    await kill_and_await(engine_a)
    assert (await status_of(engine_a)).cold_restored_blocks_total == 0
    found = [await ask(engine_a, prompt) for prompt in PROMPTS[4:8]]
    assert found == [Answer(answer.token_ids, NUM_CACHED_TOKENS) for answer in computed[4:8]]
    assert (await status_of(engine_a)).cold_restored_blocks_total == 4 * 7


async def test_another_tenant_finds_none_of_it(computed, engine_b):
    found = await ask(engine_b, PROMPTS[0], tenant="blue")
    assert found == Answer(computed[0].token_ids, 0)


async def test_a_store_that_died_is_computed_again_and_filled_again(computed, engine_b):
    import ray

    name = f"{NAME_PREFIX}{ray.get_runtime_context().get_node_id()}"
    ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=False)
    async with asyncio.timeout(60):
        answers = [await ask(engine_b, prompt) for prompt in PROMPTS]
        while answers[0].cached_tokens < NUM_CACHED_TOKENS:
            answers = [await ask(engine_b, prompt) for prompt in PROMPTS]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in computed]


async def test_two_ranks_restore_their_parts_after_a_restart(app, folder, computed):
    settings = COLD | {"tensor_parallel_size": 2, "gpus_per_rank": 1}
    settings["kv_cache_gib"] = COLD["kv_cache_gib"] / 2
    async with serving(folder, "cold-ranks", **settings) as name:
        handle = engine_handle(name)
        first = await fill(handle)
        again = [await ask(handle, prompt) for prompt in PROMPTS[:4]]
        await kill_and_await(handle, rank=1)
        restarted = [await ask(handle, prompt) for prompt in PROMPTS[4:8]]
        status = await status_of(handle)

    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in computed]
    assert again == [Answer(answer.token_ids, NUM_CACHED_TOKENS) for answer in first[:4]]
    assert restarted == [Answer(answer.token_ids, NUM_CACHED_TOKENS) for answer in first[4:8]]
    assert status.cold_restored_blocks_total == 4 * 7


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_replica_that_ends_in_order_leaves_all_it_has_cached(app, folder, num_ranks):
    """Of a pool that nothing was ever evicted from."""
    settings = COLD | {"tensor_parallel_size": num_ranks, "kv_cache_gib": 0.002}
    prompt = tuple(random.Random(100 + num_ranks).choices(range(1, 256), k=NUM_CACHED_TOKENS + 1))
    answers = []
    for _ in range(2):
        async with serving(folder, "cold-ends", **settings) as name:
            handle = engine_handle(name)
            answers.append(await ask(handle, prompt))
            assert (await status_of(handle)).cold_spilled_blocks_total == 0

    assert [answer.cached_tokens for answer in answers] == [0, NUM_CACHED_TOKENS]
    assert answers[0].token_ids == answers[1].token_ids
