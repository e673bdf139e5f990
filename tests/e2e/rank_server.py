"""Engines on a Ray of their own, in a process of their own: Ray reads its token once a process.

Reads a `Case` as JSON a line, answers with an `Answer` a line.
"""

import asyncio
import dataclasses
import json
import sys
import uuid
from dataclasses import dataclass
from typing import Any

from cluster.bringup import LocalRay, RayOptions
from router.generation import GenerationRequest, SamplingSettings


@dataclass(frozen=True)
class Case:
    model_path: str
    num_ranks: int
    max_model_len: int
    num_new_tokens: int
    prompts: list[list[int]]


@dataclass(frozen=True)
class Answer:
    """The prompts are asked twice, all at once: the second time over cached prefixes."""

    first: list[list[int]]
    second: list[list[int]]
    pids: list[int]
    weight_bytes: list[int]
    kv_bytes: list[int]


async def main() -> None:
    """One event loop for all: a Serve handle belongs to the loop that first used one."""
    with LocalRay(RayOptions(num_cpus=8, num_gpus=4, include_dashboard=False)):
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer = await serve_case(Case(**json.loads(line)))
            print(json.dumps(dataclasses.asdict(answer)), flush=True)  # noqa: T201 - the answer


async def serve_case(case: Case) -> Answer:
    from ray import serve

    from deployments.config import EngineSettings
    from deployments.flash_engine import engine_deployment
    from deployments.local_backend import LocalBackend

    settings = EngineSettings(
        tensor_parallel_size=case.num_ranks,
        gpus_per_rank=1,
        kv_cache_gib=0.25,
        max_model_len=case.max_model_len,
        lease_s=60,
    )
    deployment = engine_deployment(case.model_path, settings)
    await asyncio.to_thread(serve.run, deployment, name="ranks", route_prefix=None)
    try:
        engine = serve.get_deployment_handle("FlashEngine", "ranks")
        backend = LocalBackend(engine, 60.0)
        first, second = [
            await asyncio.gather(
                *(complete(backend, case, index) for index in range(len(case.prompts)))
            )
            for _ in range(2)
        ]
        loads = await engine.rank_loads.remote()
    finally:
        await asyncio.to_thread(serve.delete, "ranks")
    return Answer(
        first,
        second,
        [load.pid for load in loads],
        [load.weight_bytes for load in loads],
        [load.kv_bytes for load in loads],
    )


async def complete(backend: Any, case: Case, index: int) -> list[int]:
    sampling = SamplingSettings(max_tokens=case.num_new_tokens, temperature=0.0)
    prompt = tuple(case.prompts[index])
    request = GenerationRequest(uuid.uuid4().hex, "m", prompt, sampling)
    await backend.submit(request)
    return [
        token_id
        async for events in backend.subscribe(request.request_id)
        for event in events
        for token_id in event.token_ids
    ]


if __name__ == "__main__":
    asyncio.run(main())
