"""A GPU's handles, counted: work passes when it is waited for, and whatever is asked may fail."""

import random
from collections.abc import Callable
from typing import Any

import torch

from kernels.device import Kind, PinnedPool


class Handle:
    def __init__(self, kind: Kind, number: int) -> None:
        self.kind, self.number = kind, number
        self.is_running = False  # of a stream or event: work was queued, and nobody waited yet


class FakeDevice:
    """`fails(action, kind)` says whether opening, releasing or waiting raises this time. What
    raises on release is released all the same, as with CUDA's sticky errors."""

    name = "fake:0"

    def __init__(self, fails: Callable[[str, Kind], bool] = lambda action, kind: False) -> None:
        self.pool = PinnedPool(self, max_idle_bytes=1 << 20)
        self.fails = fails
        self.live: dict[int, Kind] = {}
        self.released: list[int] = []
        self.waited: list[int] = []
        self._opened = 0
        self._pinned: dict[int, int] = {}  # numbers by address

    def open(self, kind: Kind, image: bytes = b"", nbytes: int = 0) -> Any:
        self._fail("open", kind)
        self._opened += 1
        self.live[self._opened] = kind
        if kind == "pinned":
            buffer = torch.empty(nbytes, dtype=torch.uint8)
            self._pinned[buffer.data_ptr()] = self._opened
            return buffer
        return Handle(kind, self._opened)

    def release(self, kind: Kind, handle: Any) -> None:
        number = self._pinned.pop(handle.data_ptr()) if kind == "pinned" else handle.number
        assert self.live.pop(number) == kind, f"{kind} {number} released twice, or as another kind"
        self.released.append(number)
        self._fail("release", kind)

    def has_passed(self, event: Handle) -> bool:
        return not event.is_running

    def wait(self, stream_or_event: Handle) -> None:
        stream_or_event.is_running = False
        self.waited.append(stream_or_event.number)
        self._fail("wait", stream_or_event.kind)

    def _fail(self, action: str, kind: Kind) -> None:
        if self.fails(action, kind):
            raise RuntimeError(f"{action} {kind}")


def failing_at_random(seed: int, share: float) -> Callable[[str, Kind], bool]:
    generator = random.Random(seed)
    return lambda action, kind: generator.random() < share
