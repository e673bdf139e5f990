"""One rank of an engine as a Ray actor. Torch is imported where weights are loaded, not before."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from deployments.cold_client import ColdClient
from deployments.cold_store import ColdStoreLimits
from deployments.engine_shell import RankLoad, RankStatus
from deployments.in_process_rank import rank_status
from deployments.model_files import MANIFEST
from deployments.node_stores import NodeStores
from deployments.rank_channel import ChannelEnd
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.outputs import Usage
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deployments.grammars import ModelGrammars
    from engine.execution.model_runner import ModelRunner
    from engine.ranks.follower import FollowerLoop
    from engine.ranks.plan_ring import PlanRing, RingAddress

PEER_TIMEOUT_S = 300.0  # a backstop: the group's watcher ends a stalled group long before


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where rank 0 waits for the others. Gone with rank 0's process."""

    store_port: int
    ring: RingAddress


class EngineRank:
    """The actor that owns a device, its shard of the weights and its KV. Its methods only queue and
    report: the step loop has a thread of its own and shares no interpreter with Serve.

    `open` (rank 0 of several), then `load`, then `run`, which lasts as long as the rank. Only
    rank 0 has an engine: the others take no calls but these and end with it.
    """

    def __init__(
        self, config: EngineConfig, place: RankPlace, cold_limits: ColdStoreLimits | None = None
    ) -> None:
        """`cold_limits` of the node's store, None for an engine without a cold tier."""
        self._config = config
        self._place = place
        self._cold_tier: ColdClient | None = None
        if cold_limits is not None:
            self._cold_tier = ColdClient(
                NodeStores(cold_limits), rank=place.rank, num_ranks=place.size
            )
        self._store: Any = None  # as long as it lives, the others can join
        self._ring: PlanRing | None = None
        self._engine: AsyncEngine | None = None
        self._follower: FollowerLoop | None = None

    def open(self) -> Rendezvous:
        """Raises EngineError."""
        from engine.build import open_ring
        from engine.ranks.group import serve_store

        self._store = serve_store(self._options())
        self._ring = open_ring(self._config, self._place.size)
        return Rendezvous(self._store.port, self._ring.address)

    def load(self, rendezvous: Rendezvous | None) -> RankLoad:
        """Answers once the weights are loaded, on every rank. Raises EngineError."""
        runner = self._lead_alone() if rendezvous is None else self._join(rendezvous)
        # What is there now stays: the collector need not walk through it while steps run.
        gc.collect()
        gc.freeze()
        return RankLoad(os.getpid(), runner.weight_bytes, runner.kv_bytes)

    def run(self) -> NoReturn:
        """Returns never. Raises EngineError: why the rank has ended."""
        if self._follower is not None:
            self._follower.run()
        self._leading().run_out()

    def add(
        self,
        seq_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        cache_salt: bytes,
        priority: int,
    ) -> None:
        self._leading().add(
            seq_id, prompt_token_ids, params, cache_salt=cache_salt, priority=priority
        )

    def abort(self, seq_id: str) -> Usage | None:
        return self._leading().abort(seq_id)

    def open_channel(self) -> str:
        """Where one shell finds the outputs, and may add what takes no compiling."""
        return ChannelEnd(self._leading()).path

    def drain(self, timeout_s: float) -> None:
        """End the engine and hand what it has cached to the cold tier, as far as time allows.
        Rank 0 first: it tells the others what to hand over."""
        if self._cold_tier is None:
            return
        deadline_s = time.monotonic() + timeout_s
        if self._engine is not None:
            self._engine.shutdown(timeout_s)
            for _ in self._engine.spill_cached():
                if not self._cold_tier.flush(deadline_s - time.monotonic()):
                    return
        self._cold_tier.flush(deadline_s - time.monotonic())

    def status(self) -> RankStatus:
        return rank_status(
            self._leading(),
            cold_tier=None if self._cold_tier is None else self._cold_tier.counters,
        )

    def _lead_alone(self) -> ModelRunner:
        from engine.build import build_engine_around, build_model_runner

        runner = build_model_runner(self._config, cold_tier=self._cold_tier)
        self._engine = AsyncEngine(
            build_engine_around(runner, self._config, grammars=self._grammars())
        )
        return runner

    def _join(self, rendezvous: Rendezvous) -> ModelRunner:
        from engine.build import build_follower, build_leader, build_model_runner
        from engine.ranks.group import connect_store, join_ranks
        from engine.ranks.plan_ring import PlanReader

        options, ring = self._options(), self._ring
        reader: PlanReader | None = None
        if ring is None:
            reader = PlanReader(rendezvous.ring, self._place.rank - 1)
            self._store = connect_store(options, rendezvous.store_port)
        ranks = join_ranks(options, self._store)
        runner = build_model_runner(self._config, ranks, self._cold_tier)
        ranks.minimum(1)  # every rank has attached to the ring, and has room for its weights
        if ring is not None:
            ring.seal()
            leader = build_leader(runner, self._config, ranks, ring, self._grammars())
            self._engine = AsyncEngine(leader)
        elif reader is not None:
            self._follower = build_follower(runner, reader)
        return runner

    def _grammars(self) -> ModelGrammars | None:
        """None for bare weights: nobody says what their tokens spell."""
        from deployments.grammars import ModelGrammars

        folder = self._config.model_path
        return ModelGrammars.of_model(folder) if (folder / MANIFEST).is_file() else None

    def _options(self) -> Any:
        from engine.ranks.group import RankOptions

        return RankOptions(self._place.rank, self._place.size, self._config.device, PEER_TIMEOUT_S)

    def _leading(self) -> AsyncEngine:
        assert self._engine is not None, "only rank 0 has an engine, once it is loaded"
        return self._engine
