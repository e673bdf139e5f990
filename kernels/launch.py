"""How an op's entry point runs its kernel, without importing Triton where a bundle has the code."""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kernels.bundle.driver import Grid
from kernels.bundle.launching import BundleWay
from kernels.contract import Contract

if TYPE_CHECKING:
    from kernels.kernel import Kernel

Way = Callable[["Launcher", Grid, Sequence[Any], Mapping[str, int]], None]
_way: ContextVar[Way | None] = ContextVar("way", default=None)


class Launcher:
    """source: "module:name" of the declared kernel, imported only when it must be."""

    def __init__(self, contract: Contract, source: str) -> None:
        self.contract = contract
        self.source = source

    def __call__(self, grid: Grid, *arguments: Any, **meta: int) -> None:
        """Launch on the current stream. Raises ContractError before anything runs."""
        self.contract.check(*arguments)
        if 0 in grid:
            self.contract.check_without_programs(*arguments)
            return
        way = _way.get() or compiled
        way(self, grid, arguments, meta)

    def kernel(self) -> "Kernel":
        module, name = self.source.split(":")
        declared: Kernel = getattr(importlib.import_module(module), name)
        return declared


def compiled(
    launcher: Launcher, grid: Grid, arguments: Sequence[Any], meta: Mapping[str, int]
) -> None:
    """On a GPU: from the bundle of this process, else just in time."""
    _way_of_process()(launcher, grid, arguments, meta)


@cache
def _way_of_process() -> BundleWay:
    return BundleWay.of_process()


def cdiv(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


@cache
def num_sms(device: torch.device, without_a_gpu: int) -> int:
    """How many multiprocessors run the programs of a launch; of a CPU, that interprets them, so
    many as it is told."""
    if device.type != "cuda":
        return without_a_gpu
    return torch.cuda.get_device_properties(device).multi_processor_count


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether an op runs its kernel on this tensor; if not, it computes its reference."""
    return tensor.is_cuda or _way.get() is not None


@contextmanager
def launching(way: Way) -> Iterator[None]:
    """Within it every launch goes that way: the checked interpreter's, or a test's."""
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)
