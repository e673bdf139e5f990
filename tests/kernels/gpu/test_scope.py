"""Ten thousand scopes on a GPU leave its memory as it was."""

import gc
from typing import Any

import pynvml
import pytest
import torch

from kernels.device import MIN_PINNED_BYTES, cuda_device
from kernels.scope import DeviceScope

pytestmark = pytest.mark.gpu


def test_ten_thousand_scopes_leave_gpu_memory_as_it_was():
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    device = cuda_device(0)
    source = torch.arange(1024, dtype=torch.uint8)
    target = torch.empty(1024, dtype=torch.uint8, device="cuda:0")
    for cycle in range(10_100):
        if cycle == 100:  # what torch opens once and for all is open
            before = used_bytes(gpu)
        with DeviceScope(device) as scope:
            _copy(scope, source, target, is_captured=cycle % 100 == 0)  # a capture takes long
    assert used_bytes(gpu) == before
    assert torch.equal(target.cpu(), source)
    assert device.pool.idle_bytes == MIN_PINNED_BYTES


def used_bytes(gpu: Any) -> int:
    """Of the GPU, without what torch keeps of earlier tests."""
    gc.collect()
    torch.cuda.empty_cache()
    return int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)


def _copy(
    scope: DeviceScope, source: torch.Tensor, target: torch.Tensor, *, is_captured: bool
) -> None:
    stream, copied, graph = scope.stream(), scope.event(), scope.graph()
    staging = scope.pinned(source.nbytes)
    staging.value.copy_(source)
    if is_captured:
        with torch.cuda.graph(graph.value, stream=stream.value):
            target.copy_(staging.value, non_blocking=True)
    with torch.cuda.stream(stream.value):
        if is_captured:
            graph.value.replay()
        else:
            target.copy_(staging.value, non_blocking=True)
    copied.value.record(stream.value)
    scope.give_back(staging, after=copied)
