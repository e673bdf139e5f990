"""The Flash engine on Ray: a rank actor per device that runs the step loop, and the Serve replica,
a shell without a device, in front of it."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.config import EngineSettings
from deployments.engine_shell import EngineShell, RankStatus, ShellOptions
from engine.async_engine import AsyncEngine
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import EngineError, EngineStopped
from engine.outputs import StepOutput, Usage
from engine.sampling_params import SamplingParams
from router.backends.base import BackendStatus, OrphanedGeneration
from router.errors import BackendError
from router.generation import GenerationRequest, TokenEvent
from router.generation import Usage as RouterUsage

logger = logging.getLogger(__name__)

OUTPUT_WAIT_S = 5.0
SHELL_CPUS = 0.1
RANK_CONCURRENCY = 16  # threads: one waits for outputs, the others add, abort and report


def engine_config(model_path: str, settings: EngineSettings) -> EngineConfig:
    return EngineConfig(
        model_path=Path(model_path),
        device=settings.device,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        num_threads=settings.num_threads,
        cache=CacheConfig(
            kv_cache_bytes=int(settings.kv_cache_gib * (1 << 30)),
            enable_prefix_cache=settings.enable_prefix_cache,
        ),
        scheduler=SchedulerConfig(
            max_num_sequences=settings.max_num_sequences,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        ),
    )


class EngineRank:
    """The actor that owns a device, its weights and its KV. Its methods only queue and report:
    the step loop has its own thread and shares no interpreter with Serve."""

    def __init__(self, config: EngineConfig) -> None:
        from engine.build import build_engine

        self._engine = AsyncEngine(build_engine(config))

    def ready(self) -> int:
        """Answers once weights are loaded; the process id."""
        return os.getpid()

    def add(
        self,
        seq_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        cache_salt: bytes,
        priority: int,
    ) -> None:
        self._engine.add(seq_id, prompt_token_ids, params, cache_salt=cache_salt, priority=priority)

    def abort(self, seq_id: str) -> Usage | None:
        return self._engine.abort(seq_id)

    def next_outputs(self) -> list[StepOutput]:
        return self._engine.next_outputs(OUTPUT_WAIT_S)

    def status(self) -> RankStatus:
        stats, totals = self._engine.stats, self._engine.totals
        return RankStatus(
            stalled_s=self._engine.last_progress_s,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_free_blocks=stats.num_free_blocks,
            num_blocks=stats.num_blocks,
            prompt_tokens_total=totals.prompt_tokens,
            cached_tokens_total=totals.cached_tokens,
            completion_tokens_total=totals.completion_tokens,
            preemptions_total=totals.preemptions,
        )


class RayRank:
    """A rank actor as the shell's RankClient: Ray's errors become the engine's."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def add(self, *arguments: Any) -> None:
        await self._call("add", *arguments)

    async def abort(self, seq_id: str) -> Usage | None:
        usage: Usage | None = await self._call("abort", seq_id)
        return usage

    async def next_outputs(self) -> list[StepOutput]:
        outputs: list[StepOutput] = await self._call("next_outputs")
        return outputs

    async def status(self) -> RankStatus:
        status: RankStatus = await self._call("status")
        return status

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as exc:
            if isinstance(exc.cause, EngineError):
                raise exc.cause from exc
            raise EngineStopped(f"{method} failed in the rank: {exc.cause!r}") from exc
        except RayActorError as exc:
            raise EngineStopped("the rank's process died") from exc


class FlashEngine:
    """The Serve replica: submit, subscribe, abort, renew, status; health is step progress."""

    def __init__(self, model_path: str, settings: EngineSettings) -> None:
        self._settings = settings
        actor = _rank_actor(settings).remote(engine_config(model_path, settings))
        self._rank_pid: int = ray.get(actor.ready.remote())
        self._shell = EngineShell(
            RayRank(actor),
            ShellOptions(settings.lease_s, settings.retention_s, settings.step_timeout_s),
        )
        self._started = False

    async def submit(self, request: GenerationRequest) -> None:
        self._start()
        await self._shell.submit(request)

    async def subscribe(self, request_id: str, after_index: int = 0) -> Any:
        events: list[TokenEvent]
        async for events in self._shell.subscribe(request_id, after_index):
            yield events

    async def abort(self, request_id: str) -> RouterUsage | None:
        return await self._shell.abort(request_id)

    async def renew(self, request_ids: list[str]) -> None:
        await self._shell.renew(request_ids)

    async def acknowledge(self, request_ids: list[str]) -> None:
        await self._shell.acknowledge(request_ids)

    async def claim_orphans(self) -> list[OrphanedGeneration]:
        return await self._shell.claim_orphans()

    async def status(self) -> BackendStatus:
        self._start()
        return await self._shell.status()

    async def rank_pids(self) -> list[int]:
        return [self._rank_pid]

    async def check_health(self) -> None:
        """Serve replaces the replica, and with it the rank, when this raises."""
        async with asyncio.timeout(self._settings.step_timeout_s):
            status = await self.status()
        if not status.ready:
            raise BackendError(status.reason)

    def _start(self) -> None:
        if not self._started:  # the replica's event loop exists from the first call on
            self._started = True
            self._shell.start()


def _rank_actor(settings: EngineSettings) -> Any:
    """The actor class, placed in the replica's own placement group beside the shell's bundle."""
    placement_group = ray.util.get_current_placement_group()
    assert placement_group is not None, "the deployment asks for bundles"
    return ray.remote(EngineRank).options(
        num_cpus=1,
        num_gpus=1 if settings.device.startswith("cuda") else 0,
        max_concurrency=RANK_CONCURRENCY,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group, placement_group_bundle_index=1
        ),
    )


def engine_deployment(model_path: str, settings: EngineSettings) -> serve.Application:
    """The bound deployment: one bundle for the shell, one for its rank."""
    rank_bundle: dict[str, float] = {"CPU": 1}
    if settings.device.startswith("cuda"):
        rank_bundle["GPU"] = 1
    deployment: serve.Deployment = serve.deployment(
        name="FlashEngine",
        num_replicas=1,
        ray_actor_options={"num_cpus": SHELL_CPUS},
        placement_group_bundles=[{"CPU": SHELL_CPUS}, rank_bundle],
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=10_000,
        health_check_period_s=2,
        health_check_timeout_s=settings.step_timeout_s + 30,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=5,
    )(FlashEngine)
    return deployment.bind(model_path, settings)
