"""What a launch costs the host: printed, and the contract's part bounded."""

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from tests.kernels.gpu.cases import launches_by_kernel, small_calls

pytestmark = pytest.mark.gpu
MAX_CONTRACT_US = 10.0


def median_us(call: Callable[[], object], repetitions: int = 2000) -> float:
    times = []
    for _ in range(repetitions):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1000


def test_a_contract_is_checked_within_10_us() -> None:
    for name, (launcher, arguments) in sorted(launches_by_kernel(small_calls()).items()):
        check = launcher.contract.check
        cost_us = median_us(lambda check=check, arguments=arguments: check(*arguments))
        print(f"{name}: contract {cost_us:.1f} us")
        assert cost_us <= MAX_CONTRACT_US, name


def test_the_cost_of_a_call_is_known() -> None:
    torch.use_deterministic_algorithms(False)  # no poison, which would cost a launch as well
    for name, call in small_calls().items():
        call()
        torch.cuda.synchronize()
        print(f"{name}: {median_us(call, 500):.1f} us a call, allocation included")
        torch.cuda.synchronize()
