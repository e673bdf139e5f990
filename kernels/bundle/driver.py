"""The one seam to CUDA: which GPU and stream are current, loading code, launching it."""

import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from kernels.bundle.index import Entry
from kernels.errors import BundleError

Grid = tuple[int, ...]
# What a kernel may use without being asked for more.
DEFAULT_SHARED_BYTES = 48 * 1024
MAX_REMEMBERED = 4096


class LaunchConfig(NamedTuple):
    """block: threads of a program. waits: for the kernels before it by itself, so that its programs
    may start before those have ended."""

    grid: Grid
    block: int
    shared_bytes: int
    waits: bool


class Driver(Protocol):
    def current_device(self) -> int: ...

    def current_stream(self, device: int) -> int:
        """Its address."""

    def capability(self, device: int) -> int:
        """90 for compute capability 9.0."""

    def load(self, entry: Entry, image: bytes, device: int) -> Any:
        """Raises BundleError when this GPU's driver does not take the code."""

    def launch(
        self, function: Any, config: LaunchConfig, stream: int, arguments: Sequence[Any]
    ) -> None:
        """arguments: addresses as int, scalars as numpy.int32 and numpy.float32."""


class _Entered(threading.local):
    """The devices whose context this thread has: the default stream is that of the current context,
    and a thread has none before a call that needs one, which torch's allocator need not make."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


class CudaDriver:
    """cuda.core, on torch's context and streams."""

    def __init__(self) -> None:
        self._configs: dict[LaunchConfig, Any] = {}
        self._streams: dict[int, Any] = {}
        self._entered = _Entered()

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def current_stream(self, device: int) -> int:
        if device not in self._entered.devices:
            self._core.Device(device).set_current()
            self._entered.devices.add(device)
        return torch.cuda.current_stream(device).cuda_stream

    def capability(self, device: int) -> int:
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor

    def load(self, entry: Entry, image: bytes, device: int) -> Any:
        try:
            codes = self._core.ObjectCode
            read = codes.from_cubin if entry.form == "cubin" else codes.from_ptx
            function = read(image, name=str(entry.key)).get_kernel(entry.symbol)
            if entry.shared_bytes > DEFAULT_SHARED_BYTES:
                _allow_shared(function, entry.shared_bytes, device)
        except Exception as exc:
            raise BundleError(
                f"{entry.key}: the {entry.form} for sm_{entry.arch} does not load: {exc}"
            ) from exc
        return function

    def launch(
        self, function: Any, config: LaunchConfig, stream: int, arguments: Sequence[Any]
    ) -> None:
        known = self._configs.get(config) or self._remember_config(config)
        on = self._streams.get(stream) or self._remember_stream(stream)
        self._core.launch(on, known, function, *arguments)

    @cached_property
    def _core(self) -> Any:
        import cuda.core

        return cuda.core

    def _remember_config(self, config: LaunchConfig) -> Any:
        known = self._core.LaunchConfig(
            grid=config.grid,
            block=config.block,
            shmem_size=config.shared_bytes,
            programmatic_stream_serialization=config.waits,
        )
        _remember(self._configs, config, known)
        return known

    def _remember_stream(self, address: int) -> Any:
        """Only the address of a stream is used: that another one has it later does no harm."""
        stream = self._core.Stream.from_handle(address)
        _remember(self._streams, address, stream)
        return stream


def _allow_shared(function: Any, shared_bytes: int, device: int) -> None:
    """cuda.core reads this attribute, but cannot set it."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    status, handle = driver.cuDeviceGet(device)
    if status == driver.CUresult.CUDA_SUCCESS:
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, function.handle, handle)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise BundleError(f"{status.name} for {shared_bytes} bytes of shared memory")


def _remember(remembered: dict[Any, Any], key: Any, value: Any) -> None:
    if len(remembered) >= MAX_REMEMBERED:
        remembered.clear()
    remembered[key] = value
