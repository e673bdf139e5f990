"""`python -m tests.kernels.gpu.launch_cost`: microseconds of each kernel's contract check and of
each op's call, as JSON. In a process of its own: what other tests leave running would be measured
as well.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch

from tests.kernels.gpu.cases import launches_by_kernel, small_calls
from tests.kernels.launches import is_bundled, launches_of


def median_us(call: Callable[[], object], repetitions: int = 2000) -> float:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1000


def contracts_us() -> dict[str, float]:
    return {
        name: median_us(lambda check=launcher.contract.check, given=arguments: check(*given))
        for name, (launcher, arguments) in sorted(launches_by_kernel(small_calls()).items())
    }


def calls_us() -> dict[str, float]:
    """Allocation included. Of bundled forms: to compile the others takes a minute."""
    found = {}
    for name, call in small_calls().items():
        if not all(is_bundled(*each) for each in launches_of(call)):
            continue
        call()
        torch.cuda.synchronize()
        found[name] = median_us(call, 500)
        torch.cuda.synchronize()
    return found


if __name__ == "__main__":
    print(json.dumps({"contracts": contracts_us(), "calls": calls_us()}))
