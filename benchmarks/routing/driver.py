"""Routers in processes of their own, each with its own view of the replicas, asking in a closed
loop."""

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.errors import MeasurementFailed
from router.backends.base import BackendStatus
from router.errors import BackendError
from router.generation import GenerationRequest, Usage

LEASE_S = 30.0


class RouterProcess:
    """An actor: what Serve keeps of replicas belongs to one process and one event loop."""

    def __init__(self, app_name: str) -> None:
        from ray import serve

        from deployments.local_backend import LocalBackend

        self._engines: Any = serve.get_deployment_handle("FlashEngine", app_name)
        self._backend = LocalBackend(self._engines, LEASE_S)

    async def ask_all(self, requests: Sequence[GenerationRequest], num_at_once: int) -> list[Usage]:
        waiting = iter(requests)  # shared: whoever is free takes the next

        async def ask_in_turn() -> list[Usage]:
            return [await self._ask(request) for request in waiting]

        answers = await asyncio.gather(*(ask_in_turn() for _ in range(num_at_once)))
        return [usage for usages in answers for usage in usages]

    async def statuses(self) -> list[BackendStatus]:
        statuses: list[BackendStatus] = await self._engines.broadcast("status").results_async()
        return statuses

    async def _ask(self, request: GenerationRequest) -> Usage:
        usage: Usage | None = None
        await self._backend.submit(request)
        async for events in self._backend.subscribe(request.request_id):
            usage = events[-1].usage
        await self._backend.acknowledge([request.request_id])
        if usage is None:
            raise BackendError(f"{request.request_id} had no events")
        return usage


def ask_all(
    requests: Sequence[GenerationRequest], app_name: str, num_routers: int, num_at_once: int
) -> tuple[list[Usage], list[int]]:
    """The answers, and the tokens that each replica served, prompts and completions. Every
    `num_routers`-th request goes through the same router; `num_at_once` of all run.
    Raises MeasurementFailed when one is not answered."""
    import ray

    process: Any = ray.remote(num_cpus=0.1)(RouterProcess)
    routers = [process.remote(app_name) for _ in range(num_routers)]
    calls = [
        router.ask_all.remote(requests[first::num_routers], num_at_once // num_routers)
        for first, router in enumerate(routers)
    ]
    try:
        answers: list[list[Usage]] = ray.get(calls)
    except ray.exceptions.RayTaskError as exc:
        raise MeasurementFailed(f"a request was not answered: {exc.cause!r}") from exc
    statuses = ray.get(routers[0].statuses.remote())
    return [usage for usages in answers for usage in usages], [
        status.prompt_tokens_total + status.completion_tokens_total for status in statuses
    ]
