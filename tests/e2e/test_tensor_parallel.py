"""Greedy tokens of several ranks equal those of one, through Serve: the real SmolLM2 on three, and
random Llama and Qwen3 models on two and four, one actor for each (imagined) GPU."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.bringup import LocalRay, RayOptions
from deployments.config import EngineSettings
from deployments.engine_shell import RankLoad
from deployments.local_backend import LocalBackend
from engine.build import build_engine
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.sampling_params import SamplingParams
from router.generation import GenerationRequest, SamplingSettings

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

NUM_NEW_TOKENS = 24
MAX_MODEL_LEN = 640
TOLERANCE = 0.02
SIZES: dict[str, Any] = {
    "vocab_size": 1021,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def ray_up() -> Iterator[None]:
    with LocalRay(RayOptions(num_cpus=8, num_gpus=4, include_dashboard=False)):
        yield


def random_model(folder: Path, family: str, num_kv_heads: int) -> Path:
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES, num_key_value_heads=num_kv_heads)
    torch.manual_seed(1)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return folder


def prompts_of(vocab_size: int) -> list[tuple[int, ...]]:
    """Of 1 to 600 tokens, some with a common beginning: chunked prefills and prefix hits."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(3, vocab_size, (600,), generator=generator).tolist()
    lengths = (1, 3, 40, 128, 200, 600)
    return [tuple(drawn[:length]) for length in lengths] + [tuple(drawn[90:300])]


def expected_of(model_path: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    engine = build_engine(
        EngineConfig(
            model_path,
            max_model_len=MAX_MODEL_LEN,
            cache=CacheConfig(kv_cache_bytes=256 << 20),
            scheduler=SchedulerConfig(8, 256),
        )
    )
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(NUM_NEW_TOKENS, temperature=0.0))
    completions: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step().outputs:
            completions[int(output.seq_id)] += output.token_ids
    return completions


@asynccontextmanager
async def serving(model_path: Path, num_ranks: int) -> AsyncIterator[Any]:
    from ray import serve

    from deployments.flash_engine import engine_deployment

    settings = EngineSettings(
        tensor_parallel_size=num_ranks,
        gpus_per_rank=1,
        kv_cache_gib=0.25,
        max_model_len=MAX_MODEL_LEN,
        lease_s=60,
    )
    name = f"ranks-{num_ranks}"
    deployment = engine_deployment(str(model_path), settings)
    await asyncio.to_thread(serve.run, deployment, name=name, route_prefix=None)
    try:
        yield serve.get_deployment_handle("FlashEngine", name)
    finally:
        await asyncio.to_thread(serve.delete, name)


async def complete(backend: LocalBackend, prompt: tuple[int, ...]) -> list[int]:
    sampling = SamplingSettings(max_tokens=NUM_NEW_TOKENS, temperature=0.0)
    request = GenerationRequest(uuid.uuid4().hex, "m", prompt, sampling)
    await backend.submit(request)
    return [
        token_id
        async for events in backend.subscribe(request.request_id)
        for event in events
        for token_id in event.token_ids
    ]


async def check_parity(model_path: Path, num_ranks: int, vocab_size: int) -> None:
    prompts = prompts_of(vocab_size)
    expected = expected_of(model_path, prompts)
    async with serving(model_path, num_ranks) as engine:
        backend = LocalBackend(engine, 60.0)
        for _ in range(2):  # the second time over cached prefixes
            completions = await asyncio.gather(*(complete(backend, prompt) for prompt in prompts))
            assert completions == expected
        check_bytes(await engine.rank_loads.remote(), num_ranks)


def check_bytes(loads: list[RankLoad], num_ranks: int) -> None:
    assert len({load.pid for load in loads} - {os.getpid()}) == num_ranks
    for numbers in zip(*((load.weight_bytes, load.kv_bytes) for load in loads), strict=True):
        assert max(numbers) <= (1 + TOLERANCE) * min(numbers)


async def test_smollm2_on_three_ranks(ray_up, smollm2_path):
    await check_parity(smollm2_path, 3, 49_152)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("family", "num_kv_heads"), [("Llama", 4), ("Qwen3", 2)])
async def test_random_models(ray_up, family, num_kv_heads, num_ranks, tmp_path):
    """Qwen3 has two KV heads: on four ranks, each is held twice."""
    await check_parity(random_model(tmp_path, family, num_kv_heads), num_ranks, 1021)
