"""What opens and releases things on a GPU: a narrow seam below `kernels.scope`."""

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, Protocol

import torch

Kind = Literal["stream", "event", "graph", "module", "pinned"]

MIN_PINNED_BYTES = 4096
MAX_IDLE_PINNED_BYTES = 2**30


class Device(Protocol):
    name: str  # such as cuda:0
    pool: "PinnedPool"

    def open(self, kind: Kind, image: bytes = b"", nbytes: int = 0) -> Any:
        """image: of a module, a cubin. nbytes: of pinned memory, which is a uint8 tensor."""

    def release(self, kind: Kind, handle: Any) -> None:
        """Nothing on the GPU uses it any more."""

    def has_passed(self, event: Any) -> bool: ...

    def wait(self, stream_or_event: Any) -> None:
        """For all that was queued on the stream, or before the event."""


class PinnedPool:
    """Idle page-locked host memory by size class, a power of two, kept because pinning is slow
    (measured: 169 ms for 256 MiB). All scopes of a device share its pool."""

    def __init__(self, device: Device, max_idle_bytes: int = MAX_IDLE_PINNED_BYTES) -> None:
        self._device = device
        self._max_idle_bytes = max_idle_bytes
        self._idle: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.idle_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A buffer of at least that many bytes."""
        size = max(MIN_PINNED_BYTES, 1 << (nbytes - 1).bit_length())
        if self._idle[size]:
            self.idle_bytes -= size
            return self._idle[size].pop()
        buffer: torch.Tensor = self._device.open("pinned", nbytes=size)
        return buffer

    def put(self, buffer: torch.Tensor) -> None:
        """Of a buffer that nothing reads or writes any more."""
        if self.idle_bytes + buffer.nbytes > self._max_idle_bytes:
            self._device.release("pinned", buffer)
            return
        self.idle_bytes += buffer.nbytes
        self._idle[buffer.nbytes].append(buffer)

    def clear(self) -> None:
        for buffers in self._idle.values():
            while buffers:
                buffer = buffers.pop()
                self.idle_bytes -= buffer.nbytes
                self._device.release("pinned", buffer)


class CudaDevice:
    """torch's streams, events, graphs and pinned memory; cuda.core's modules."""

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.pool = PinnedPool(self)

    def open(self, kind: Kind, image: bytes = b"", nbytes: int = 0) -> Any:
        with torch.cuda.device(self.name):
            return _OPENERS[kind](image, nbytes)

    def release(self, kind: Kind, handle: Any) -> None:
        """The others go with their last reference, which the scope drops."""
        if kind == "graph":
            handle.reset()

    def has_passed(self, event: Any) -> bool:
        has_passed: bool = event.query()
        return has_passed

    def wait(self, stream_or_event: Any) -> None:
        stream_or_event.synchronize()


@cache
def cuda_device(index: int) -> CudaDevice:
    """One per process and GPU, for its pool."""
    return CudaDevice(index)


def _module(image: bytes, _nbytes: int) -> Any:
    from cuda.core import ObjectCode

    return ObjectCode.from_cubin(image)


def _pinned(_image: bytes, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


_OPENERS: dict[Kind, Callable[[bytes, int], Any]] = {
    "stream": lambda _image, _nbytes: torch.cuda.Stream(),
    "event": lambda _image, _nbytes: torch.cuda.Event(),
    "graph": lambda _image, _nbytes: torch.cuda.CUDAGraph(),
    "module": _module,
    "pinned": _pinned,
}
