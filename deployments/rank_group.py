"""The ranks of one engine, which start, live and end together."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement import RankResources, bundle_of
from deployments.cold_store import ColdStoreLimits
from deployments.engine_rank import EngineRank, RankPlace, Rendezvous
from deployments.engine_shell import RankLoad, RankStatus
from deployments.errors import BringUpError
from deployments.rank_channel import Channel
from engine.config import EngineConfig
from engine.errors import EngineError, EngineStopped
from engine.outputs import StepOutput, Usage
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

RANK_CONCURRENCY = 16  # threads: one runs, one waits for outputs, the others add, abort, report
START_TIMEOUT_S = 1800.0  # weights may come over a network
STALL_CHECK_S = 0.5
CALL_MARGIN_S = 1.0


class RankGroup:
    """A RankClient: rank 0 answers for all. Where one rank has ended, all are ended."""

    def __init__(
        self, actors: Sequence[Any], loads: Sequence[RankLoad], channel: str, timeout_s: float
    ) -> None:
        """`channel` of rank 0. `timeout_s` without a finished step, while work is in flight, ends
        the group."""
        self.loads = tuple(loads)
        self._actors = tuple(actors)
        self._timeout_s = timeout_s
        # Handles of the very processes: a pid alone may be somebody else's by the time it is used.
        self._processes = [_open_process(load.pid) for load in loads]
        self._end_reason: str | None = None
        self._channel = Channel(channel, self._why)

    @property
    def end_reason(self) -> str | None:
        """Why the group was ended; None while it lives."""
        return self._end_reason

    async def add(
        self,
        seq_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        cache_salt: bytes,
        priority: int,
    ) -> None:
        if params.grammar is not None:  # compiled in the rank, on a thread of this call
            await self._call("add", seq_id, prompt_token_ids, params, cache_salt, priority)
            return
        await self._channel.add(
            seq_id, prompt_token_ids, params, cache_salt=cache_salt, priority=priority
        )

    async def abort(self, seq_id: str) -> Usage | None:
        usage: Usage | None = await self._call("abort", seq_id)
        return usage

    async def next_outputs(self) -> list[StepOutput]:
        return await self._channel.next_outputs()

    async def status(self) -> RankStatus:
        status: RankStatus = await self._call("status")
        return replace(status, ranks=self.loads)

    async def watch(self) -> None:
        """Returns once a rank has died, has failed or makes no progress, and all are killed."""
        waits = [asyncio.create_task(self._until_end(rank)) for rank in range(len(self._actors))]
        waits.append(asyncio.create_task(self._until_stall()))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self.end(done.pop().result())
        finally:
            for wait in waits:
                wait.cancel()

    async def drain(self, timeout_s: float) -> None:
        """Hand what is cached to the cold tier, as far as time allows; no `watch` may run. Serves
        nothing afterwards, and still has to be ended."""
        deadline_s = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s + CALL_MARGIN_S):
                for actor in self._actors:
                    await actor.drain.remote(max(0.0, deadline_s - time.monotonic()))
        except (RayError, TimeoutError) as exc:
            logger.warning("cached blocks were not all spilled error=%r", exc)

    def end(self, reason: str) -> None:
        """Kill every rank. Idempotent."""
        if self._end_reason is not None:
            return
        self._end_reason = reason
        self._channel.close()
        for process in self._processes:
            # Ray's own kill asks the worker, which cannot answer when it is stuck or stopped.
            _kill(process)
        for actor in self._actors:
            ray.kill(actor)

    async def _until_end(self, rank: int) -> str:
        try:
            await self._actors[rank].run.remote()
        except RayTaskError as exc:
            return f"rank {rank} of {len(self._actors)} failed: {exc.cause!r}"
        except RayActorError:
            return f"rank {rank} of {len(self._actors)} died"
        return f"rank {rank} of {len(self._actors)} ended"

    async def _until_stall(self) -> str:
        while True:
            await asyncio.sleep(STALL_CHECK_S)
            try:
                async with asyncio.timeout(self._timeout_s):
                    status = await self.status()
            except TimeoutError:
                return f"rank 0 did not answer for {self._timeout_s:.0f} s"
            except EngineError as exc:
                return str(exc)
            if status.stalled_s > self._timeout_s:
                return f"no step finished for {status.stalled_s:.0f} s with work in flight"

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._actors[0], method).remote(*arguments)
        except RayTaskError as exc:
            if isinstance(exc.cause, EngineError):
                raise exc.cause from exc
            raise EngineStopped(f"{method} failed in rank 0: {exc.cause!r}") from exc
        except RayActorError as exc:
            raise EngineStopped(self._why()) from exc

    def _why(self) -> str:
        return self._end_reason or "rank 0's process died"


def start_rank_group(
    config: EngineConfig,
    num_ranks: int,
    resources: RankResources,
    timeout_s: float,
    cold_limits: ColdStoreLimits | None = None,
) -> RankGroup:
    """One actor in each bundle behind the caller's own; returns once all have their weights.
    Raises BringUpError naming the rank that failed; then none is left."""
    places = [RankPlace(rank, num_ranks) for rank in range(num_ranks)]
    actors = [_rank_actor(place, resources).remote(config, place, cold_limits) for place in places]
    try:
        rendezvous: Rendezvous | None = None
        if num_ranks > 1:
            (rendezvous,) = _gather([actors[0].open.remote()], num_ranks)
        loads = _gather([actor.load.remote(rendezvous) for actor in actors], num_ranks)
        (channel,) = _gather([actors[0].open_channel.remote()], num_ranks)
        return RankGroup(actors, loads, channel, timeout_s)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise


def _gather(calls: Sequence[Any], num_ranks: int) -> list[Any]:
    """The answers, in order; the first error at once, whatever the other ranks still do."""
    pending = list(calls)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=START_TIMEOUT_S)
        if not done:
            missing = ", ".join(str(calls.index(call)) for call in pending)
            raise BringUpError(f"rank {missing}: not loaded within {START_TIMEOUT_S:.0f} s")
        try:
            ray.get(done)
        except RayError as exc:
            rank = calls.index(done[0])
            cause = exc.cause if isinstance(exc, RayTaskError) else exc
            raise BringUpError(
                f"rank {rank} of {num_ranks} did not start: {type(cause).__name__}: {cause}"
            ) from exc
    return list(ray.get(list(calls)))


def _rank_actor(place: RankPlace, resources: RankResources) -> Any:
    """The actor class, placed in the caller's own placement group beside the shell's bundle."""
    placement_group = ray.util.get_current_placement_group()
    assert placement_group is not None, "the deployment asks for bundles"
    return ray.remote(EngineRank).options(
        num_cpus=resources.num_cpus,
        num_gpus=resources.num_gpus,
        max_concurrency=RANK_CONCURRENCY,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group, placement_group_bundle_index=bundle_of(place.rank)
        ),
    )


def _open_process(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as exc:
        raise BringUpError(f"the rank in process {pid} died as soon as it was loaded") from exc


def _kill(process: int) -> None:
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it is gone already
    finally:
        os.close(process)
