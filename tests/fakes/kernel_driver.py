"""A driver that loads anything and records what it was told to launch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kernels.bundle.driver import LaunchConfig
from kernels.bundle.index import Entry
from kernels.errors import BundleError

CPU = -1  # the device of CPU tensors, so that they are on the current one


@dataclass(frozen=True)
class Function:
    entry: Entry
    image: bytes
    device: int


@dataclass(frozen=True)
class Launch:
    function: Function
    config: LaunchConfig
    stream: int
    arguments: tuple[Any, ...]


@dataclass
class FakeDriver:
    device: int = CPU
    capabilities: dict[int, int] = field(default_factory=lambda: {CPU: 90})
    refused: frozenset[str] = frozenset()  # forms of code that do not load
    max_programs: int = 0  # 0: any number
    loaded: list[Function] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def current_device(self) -> int:
        return self.device

    def current_stream(self, device: int) -> int:
        return 0x5000 + device

    def capability(self, device: int) -> int:
        return self.capabilities[device]

    def load(self, entry: Entry, image: bytes, device: int) -> Function:
        if entry.form in self.refused:
            raise BundleError(f"{entry.key}: the {entry.form} does not load: as told")
        self.loaded.append(Function(entry, image, device))
        return self.loaded[-1]

    def launch(
        self, function: Function, config: LaunchConfig, stream: int, arguments: Sequence[Any]
    ) -> None:
        if 0 < self.max_programs < math.prod(config.grid):
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        self.launches.append(Launch(function, config, stream, tuple(arguments)))
