"""What GPUs this machine has, read through NVML. No CUDA context is created."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pynvml


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """`pcie_width` is lanes now / lanes possible: a half-seated card shows here."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    free_memory_bytes: int
    pcie_width: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """`driver_version` None: no driver, hence no devices. `cuda_version` is the driver's newest."""

    driver_version: str | None
    cuda_version: str | None
    devices: tuple[GpuDevice, ...]


def read_inventory() -> GpuInventory:
    """Never raises for a machine without a driver or a GPU: that is an inventory too."""
    try:
        with _nvml():
            return _read()
    except pynvml.NVMLError:
        return GpuInventory(None, None, ())


@contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _read() -> GpuInventory:
    cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    return GpuInventory(
        driver_version=str(pynvml.nvmlSystemGetDriverVersion()),
        cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
        devices=tuple(_device(index) for index in range(pynvml.nvmlDeviceGetCount())),
    )


def _device(index: int) -> GpuDevice:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuDevice(
        index=index,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_memory_bytes=int(memory.free),
        pcie_width=(
            int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        ),
    )
