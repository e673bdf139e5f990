"""The Flash engine on Ray: the Serve replica is a shell without a device in front of its ranks."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from ray import serve

from cluster.placement import STRATEGY, RankResources, engine_bundles
from deployments.cold_store import ColdStoreLimits
from deployments.config import EngineSettings
from deployments.engine_shell import EngineShell, RankLoad, ShellOptions
from deployments.errors import ConfigError, ReplicaRefusal
from deployments.rank_group import start_rank_group
from deployments.replica_router import (
    PUBLICATION_PERIOD_S,
    ReplicaRouter,
    prefix_chain,
    routing_stats,
)
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import UnsupportedModel
from engine.models.heads import refuse_uneven_heads
from router.affinity import MAX_PREFIXES, Publication, RecentPrefixes
from router.backends.base import BackendStatus, OrphanedGeneration
from router.errors import BackendError, BackendUnavailable
from router.generation import GenerationRequest, TokenEvent
from router.generation import Usage as RouterUsage

logger = logging.getLogger(__name__)

SHELL_CPUS = 0.1
SPILL_TIMEOUT_S = 10.0  # for what is cached when a replica ends


def engine_config(model_path: str, settings: EngineSettings) -> EngineConfig:
    tiers = settings.kv_tiers
    return EngineConfig(
        model_path=Path(model_path),
        device=settings.device,
        dtype=settings.dtype,
        load_format=settings.load_format,
        max_model_len=settings.max_model_len,
        num_threads=settings.num_threads,
        attention_backend=settings.attention_backend,
        deterministic=settings.deterministic,
        quantization=settings.quantization,
        enforce_eager=settings.enforce_eager,
        cache=CacheConfig(
            kv_cache_bytes=settings.kv_cache_bytes,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            enable_prefix_cache=settings.enable_prefix_cache,
            tiers=tiers.tiers if tiers else None,
            calibration=tiers.calibration if tiers else None,
        ),
        scheduler=SchedulerConfig(
            max_num_sequences=settings.max_step_sequences,
            max_num_batched_tokens=settings.max_step_tokens,
            itl_budget_ms=settings.step_budget_ms,
        ),
    )


def cold_limits(settings: EngineSettings) -> ColdStoreLimits | None:
    """Of one node's store; None when there is to be none."""
    if not settings.cold_tier_bytes:
        return None
    return ColdStoreLimits(
        max_bytes=settings.cold_tier_bytes,
        max_tenant_bytes=int(settings.cold_tier_bytes * settings.cold_tier_tenant_share),
        chunk_bytes=settings.cold_tier_chunk_mib << 20,
    )


class FlashEngine:
    """The Serve replica: submit, follow, subscribe, abort, renew, status; health is step progress.

    A call with `replica` is meant for the replica with that Serve tag, and for no other.
    """

    def __init__(self, model_path: str, settings: EngineSettings) -> None:
        self._settings = settings
        timeout_s = settings.stall_timeout_s
        self._ranks = start_rank_group(
            engine_config(model_path, settings),
            settings.tensor_parallel_size,
            _rank_resources(settings),
            timeout_s,
            cold_limits(settings),
        )
        options = ShellOptions(settings.lease_s, settings.retention_s, timeout_s)
        self._shell = EngineShell(self._ranks, options)
        self._watch: asyncio.Task[None] | None = None
        self._tag = serve.get_replica_context().replica_tag
        self._prefixes = RecentPrefixes()

    async def submit(
        self, request: GenerationRequest, avoid: tuple[str, ...] = (), reader: str | None = None
    ) -> str:
        """The tag of this replica, which holds the generation from now on. `avoid` is for the
        router: tags of replicas that have refused it. Raises ReplicaRefusal, before it holds it."""
        self._start()
        try:
            await self._shell.submit(request, reader)
        except BackendUnavailable as exc:
            raise ReplicaRefusal(exc, self._tag) from exc
        if self._settings.num_replicas > 1:
            self._prefixes.use(prefix_chain(request))
        return self._tag

    async def locate(self, request_id: str) -> str | None:
        """The tag of this replica, if it holds the generation."""
        return self._tag if self._shell.holds(request_id) else None

    async def follow(self, reader: str, replica: str = "") -> Any:
        self._refuse_misled(replica)
        events: list[TokenEvent]
        async for events in self._shell.follow(reader):
            yield events

    async def leave(self, reader: str, request_id: str, replica: str = "") -> None:
        await self._shell.leave(reader, request_id)

    async def subscribe(self, request_id: str, after_index: int = 0, replica: str = "") -> Any:
        self._refuse_misled(replica)
        events: list[TokenEvent]
        async for events in self._shell.subscribe(request_id, after_index):
            yield events

    async def abort(self, request_id: str, replica: str = "") -> RouterUsage | None:
        return await self._shell.abort(request_id)

    async def renew(self, request_ids: list[str]) -> None:
        await self._shell.renew(request_ids)

    async def acknowledge(self, request_ids: list[str], replica: str = "") -> None:
        await self._shell.acknowledge(request_ids)

    async def claim_orphans(self) -> list[OrphanedGeneration]:
        return await self._shell.claim_orphans()

    async def status(self) -> BackendStatus:
        self._start()
        return await self._shell.status()

    async def record_routing_stats(self) -> dict[str, Any]:
        """What the routers know of this replica, a second late."""
        if self._settings.num_replicas == 1:
            return {}
        status = await self.status()
        self._prefixes.capacity = min(MAX_PREFIXES, status.num_blocks)
        return routing_stats(Publication(self._prefixes.packed(), self._shell.tokens_in_flight))

    async def rank_pids(self) -> list[int]:
        return [load.pid for load in self._ranks.loads]

    async def rank_loads(self) -> list[RankLoad]:
        return list(self._ranks.loads)

    async def check_health(self) -> None:
        """Serve replaces the replica, and with it the ranks, when this raises."""
        async with asyncio.timeout(self._settings.stall_timeout_s):
            status = await self.status()
        if not status.ready:
            raise BackendError(status.reason)

    async def __del__(self) -> None:
        """Serve awaits it when the replica ends in order: deleted, redeployed, scaled down."""
        if self._watch is not None:
            self._watch.cancel()
        if self._settings.cold_tier_bytes:
            await self._ranks.drain(SPILL_TIMEOUT_S)

    def _refuse_misled(self, replica: str) -> None:
        if replica not in ("", self._tag):
            raise BackendUnavailable("the engine died and is being restarted", retry_after_s=10)

    def _start(self) -> None:
        if self._watch is None:  # the replica's event loop exists from the first call on
            self._shell.start()
            self._watch = asyncio.create_task(self._watch_ranks())

    async def _watch_ranks(self) -> None:
        await self._ranks.watch()
        logger.error("ranks ended reason=%s", self._ranks.end_reason)


def engine_deployment(model_path: str, settings: EngineSettings) -> serve.Application:
    """The bound deployment: one bundle for the shell, one for each rank. Raises ConfigError when
    the model cannot be dealt out to so many."""
    _refuse_uneven_heads(Path(model_path), settings.tensor_parallel_size)
    deployment: serve.Deployment = serve.deployment(
        name="FlashEngine",
        num_replicas=settings.num_replicas,
        ray_actor_options={"num_cpus": SHELL_CPUS},
        placement_group_bundles=engine_bundles(
            settings.tensor_parallel_size, _rank_resources(settings), SHELL_CPUS
        ),
        placement_group_strategy=STRATEGY,
        max_ongoing_requests=10_000,
        health_check_period_s=1,
        health_check_timeout_s=settings.stall_timeout_s + 30,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=5 + (SPILL_TIMEOUT_S if settings.cold_tier_bytes else 0),
        **_replica_choice(settings),
    )(FlashEngine)
    return deployment.bind(model_path, settings)


def _replica_choice(settings: EngineSettings) -> dict[str, Any]:
    """Nothing to choose from costs nothing."""
    if settings.num_replicas == 1:
        return {}
    config = {
        "request_router_class": ReplicaRouter,
        "request_routing_stats_period_s": PUBLICATION_PERIOD_S,
    }
    return {"request_router_config": config}


def _rank_resources(settings: EngineSettings) -> RankResources:
    return RankResources(num_gpus=settings.num_gpus_per_rank)


def _refuse_uneven_heads(model_path: Path, num_ranks: int) -> None:
    """Here, and not only in the ranks: Serve would try to start them twenty times."""
    if num_ranks == 1:
        return
    written = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    num_heads = int(written["num_attention_heads"])
    num_kv_heads = int(written.get("num_key_value_heads") or num_heads)
    try:
        refuse_uneven_heads(num_heads, num_kv_heads, num_ranks)
    except UnsupportedModel as exc:
        raise ConfigError(f"engine.tensor_parallel_size: {exc}") from exc
