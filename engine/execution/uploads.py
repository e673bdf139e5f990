"""Host to device and back, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt
import torch


def upload(
    numbers: Items[float] | Items[Items[float]] | npt.NDArray[np.int64],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=dtype)
    # From pageable memory the driver would wait for the stream first.
    if isinstance(numbers, np.ndarray):
        host = torch.from_numpy(numbers).to(dtype).pin_memory()
    else:
        host = torch.tensor(numbers, dtype=dtype, pin_memory=True)
    return host.to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is there once the stream has come so far: see `Arrival`."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Arrival:
    """Of all that was queued on the current stream of `device` when this was made."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
