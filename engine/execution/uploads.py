"""Host to device and back, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16  # bytes, as kernels want their tensors
Tree = TypeVar("Tree")


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


def upload_together(tree: Tree, device: torch.device) -> Tree:
    """tree: tuples and dataclasses, with tensors on the host among them -> the same with these on
    `device`, after one transfer."""
    tensors: list[torch.Tensor] = []
    _map_tensors(tree, tensors.append)
    places, num_bytes = [], 0
    for each in tensors:
        places.append(slice(num_bytes, num_bytes + each.nbytes))
        num_bytes += -(-each.nbytes // ALIGNMENT) * ALIGNMENT

    def shares_of(packed: torch.Tensor) -> Iterator[torch.Tensor]:
        for place, each in zip(places, tensors, strict=True):
            yield packed[place].view(each.dtype).view(each.shape)

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for share, each in zip(shares_of(host), tensors, strict=True):
        share.copy_(each)
    uploaded = shares_of(host.to(device, non_blocking=True))
    result: Tree = _map_tensors(tree, lambda _: next(uploaded))
    return result


def _map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """In a fixed order."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(_map_tensors(each, change) for each in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree)]
        return replace(tree, **{n: _map_tensors(getattr(tree, n), change) for n in names})
    return tree


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

    @property
    def has_come(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
