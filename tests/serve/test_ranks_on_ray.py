"""Engines of several ranks on Ray: they start together, and where one dies or hangs, all end and
come back, with nothing left behind."""

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from deployments.config import EngineSettings
from deployments.engine_shell import RankLoad
from deployments.local_backend import LocalBackend
from router.errors import RouterError
from router.generation import GenerationRequest, SamplingSettings
from tests.fakes.checkpoint import tiny_checkpoint
from tests.serve.conftest import engine_handle

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="package")]

NUM_RANKS = 2
NUM_STREAMS = 8
LEASE_S = 5.0
TYPED_ENDS = {"finished", "BackendUnavailable", "BackendError"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "tiny"
    return tiny_checkpoint(folder, torch.float32, max_position_embeddings=4096)


@asynccontextmanager
async def serving(folder: Path, name: str, **settings: Any) -> AsyncIterator[str]:
    """The name of an app of one engine."""
    from ray import serve

    from deployments.flash_engine import engine_deployment

    changes = {"kv_cache_gib": 0.02, "lease_s": LEASE_S, "gpus_per_rank": 1} | settings
    deployment = engine_deployment(str(folder), EngineSettings(**changes))
    await asyncio.to_thread(serve.run, deployment, name=name, route_prefix=None)
    try:
        yield name
    finally:
        await asyncio.to_thread(serve.delete, name)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def ranks_app(app, folder) -> AsyncIterator[str]:
    settings = {"tensor_parallel_size": NUM_RANKS, "step_timeout_s": 6.0}
    async with serving(folder, "ranks", **settings) as name:
        yield name


@pytest.fixture
def ranks(ranks_app) -> Any:
    return engine_handle(ranks_app)


@pytest.fixture
def backend(ranks) -> LocalBackend:
    return LocalBackend(ranks, LEASE_S)


def rank_processes() -> set[int]:
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie as well
            if "".join(process.cmdline()[:1]).startswith("ray::EngineRank"):
                found.add(process.pid)
    return found


def shared_memory() -> set[str]:
    """But for the semaphores of Python's pools, which the ranks have none of."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def placement_groups() -> int:
    import ray

    table = ray.util.placement_group_table().values()
    return sum(group["state"] != "REMOVED" for group in table)


async def until(condition, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - other processes change it
            await asyncio.sleep(0.1)


async def pids_of(handle: Any, gone: frozenset[int] = frozenset()) -> list[int]:
    """Of the ranks that serve, once none of them is one of the `gone`."""
    async with asyncio.timeout(90):
        while True:
            try:
                pids = await handle.rank_pids.remote()
                if gone.isdisjoint(pids) and (await handle.status.remote()).ready:
                    return pids
            except Exception:  # whatever Serve says of a replica that is being replaced
                pass
            await asyncio.sleep(0.1)


async def read_to_its_end(backend: LocalBackend, request_id: str, started: asyncio.Event) -> str:
    try:
        async for _ in backend.subscribe(request_id):
            started.set()
    except RouterError as exc:
        return type(exc).__name__
    finally:
        started.set()
    return "finished"


async def start_streams(backend: LocalBackend, max_tokens: int = 3000) -> list[asyncio.Task[str]]:
    """As many readers, each with its first tokens."""
    streams, starts = [], []
    for number in range(NUM_STREAMS):
        sampling = SamplingSettings(max_tokens=max_tokens, temperature=0.0)
        request = GenerationRequest(uuid.uuid4().hex, "tiny", (5, 6, 7, number), sampling)
        await backend.submit(request)
        starts.append(asyncio.Event())
        streams.append(
            asyncio.create_task(read_to_its_end(backend, request.request_id, starts[-1]))
        )
    async with asyncio.timeout(30):
        for start in starts:
            await start.wait()
    return streams


async def ends_of(streams: list[asyncio.Task[str]], timeout_s: float) -> set[str]:
    async with asyncio.timeout(timeout_s):
        return set(await asyncio.gather(*streams))


async def test_ranks_hold_equal_bytes_on_devices_of_their_own(ranks):
    loads: list[RankLoad] = await ranks.rank_loads.remote()
    assert len({load.pid for load in loads}) == NUM_RANKS
    assert len({(load.weight_bytes, load.kv_bytes) for load in loads}) == 1
    devices = [psutil.Process(load.pid).environ().get("CUDA_VISIBLE_DEVICES", "") for load in loads]
    assert len(set(devices)) in (1, NUM_RANKS)  # set at start or by Ray within the process


async def test_streams_finish_and_leave_no_block_behind(backend):
    assert await ends_of(await start_streams(backend, max_tokens=30), 60) == {"finished"}
    status = await backend.status()
    assert status.num_free_blocks == status.num_blocks


async def test_ten_kills_of_any_rank(ranks, backend):
    """Streams end with a type, the ranks come back, and nothing of the dead ones is left."""
    pids = await pids_of(ranks)
    segments, num_groups = shared_memory(), placement_groups()
    num_processes = len(rank_processes())
    for round_number in range(10):
        streams = await start_streams(backend)
        os.kill(pids[round_number % NUM_RANKS], signal.SIGKILL)
        ends = await ends_of(streams, 10)
        assert ends <= TYPED_ENDS
        await until(lambda pids=pids: not any(psutil.pid_exists(pid) for pid in pids), 10)
        pids = await pids_of(ranks, gone=frozenset(pids))
        assert len(rank_processes()) == num_processes
        assert placement_groups() == num_groups
        assert shared_memory() == segments
    assert await ends_of(await start_streams(backend, max_tokens=30), 60) == {"finished"}


@pytest.mark.parametrize("rank", range(NUM_RANKS))
async def test_a_rank_that_hangs_ends_the_group_only_with_work_in_flight(ranks, backend, rank):
    pids = await pids_of(ranks)
    streams = await start_streams(backend)
    os.kill(pids[rank], signal.SIGSTOP)
    assert await ends_of(streams, 30) <= TYPED_ENDS
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 10)
    assert set(await pids_of(ranks, gone=frozenset(pids))).isdisjoint(pids)


async def test_an_idle_group_lives_on(ranks):
    pids = await pids_of(ranks)
    await asyncio.sleep(8)  # longer than the timeout of a step
    assert await pids_of(ranks) == pids


async def test_a_rank_that_cannot_start_takes_the_others_with_it_and_says_why(app, folder):
    """Weights that are cut short: the ranks meet, and fail on loading."""
    before = rank_processes()
    broken = folder.parent / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[:-1] if "safetensors" in file.name else content)
    reason = await asyncio.to_thread(start_in_vain, str(broken))
    assert reason.startswith("BringUpError: rank ")
    assert "did not start: CheckpointError" in reason
    assert "model.safetensors is not a whole safetensors file" in reason
    await until(lambda: rank_processes() <= before, 10)


def start_in_vain(model_path: str) -> str:
    """The error of `start_rank_group` beside a shell's bundle, as a Serve replica would see it."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from cluster.placement import RankResources, engine_bundles

    resources = RankResources(num_gpus=1)
    group = ray.util.placement_group(engine_bundles(2, resources, 0.1), "STRICT_PACK")
    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )

    def start() -> str:
        from deployments.config import EngineSettings
        from deployments.flash_engine import engine_config
        from deployments.rank_group import start_rank_group

        try:
            start_rank_group(engine_config(model_path, EngineSettings()), 2, resources, 60.0)
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
        return "started"

    try:
        task = ray.remote(start).options(num_cpus=0.1, scheduling_strategy=strategy)
        return ray.get(task.remote(), timeout=90)
    finally:
        ray.util.remove_placement_group(group)
