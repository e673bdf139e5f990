"""What the ranks of one engine say to each other inside a step."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from engine.errors import RankLost

LOOPBACK, LOOPBACK_INTERFACE = "127.0.0.1", "lo"  # all ranks of an engine are on one node


class Ranks(Protocol):
    """Every rank must make the same calls in the same order. Raises RankLost."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, written over `partial`, which is returned."""

    def gather_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """columns [num_rows, width] -> on rank 0 [num_rows, size * width] in the order of the
        ranks; the others get their own back."""

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, written over everybody else's `values`, which is returned."""

    def minimum(self, count: int) -> int:
        """The smallest `count` of all ranks."""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """An engine on one device: nothing to say, nothing copied."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def gather_columns(self, columns: torch.Tensor) -> torch.Tensor:
        return columns

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def minimum(self, count: int) -> int:
        return count


SINGLE_RANK = SingleRank()


class TorchRanks:
    """gloo on CPU, NCCL on GPUs. Not thread-safe: the thread that steps makes the calls."""

    def __init__(self, rank: int, size: int, backend: Any, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._device = device

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        if not partial.numel():
            return partial
        with self._lost_as_such():
            self._backend.allreduce([partial]).wait()
        return partial

    def gather_columns(self, columns: torch.Tensor) -> torch.Tensor:
        columns = columns.contiguous()
        parts = [torch.empty_like(columns) for _ in range(self.size if self.rank == 0 else 0)]
        options = dist.GatherOptions()
        options.rootRank = 0
        with self._lost_as_such():
            self._backend.gather([parts] if parts else [], [columns], options).wait()
        return torch.cat(parts, dim=1) if parts else columns

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        with self._lost_as_such():
            self._backend.broadcast([values], options).wait()
        return values

    def minimum(self, count: int) -> int:
        counts = torch.tensor([count], dtype=torch.int64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        with self._lost_as_such():
            self._backend.allreduce([counts], options).wait()
        return int(counts.item())

    def close(self) -> None:
        """Fail what waits for the others, and end the threads. Idempotent."""
        self._backend.abort()

    @contextmanager
    def _lost_as_such(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:  # what torch raises for a closed connection and a timeout
            raise RankLost(
                f"rank {self.rank} of {self.size} lost another rank: {exc}; start the group again"
            ) from exc


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Where one rank stands in its group. `timeout_s` bounds every wait for another rank."""

    rank: int
    size: int
    device: str = "cpu"
    timeout_s: float = 60.0


def serve_store(options: RankOptions) -> Store:
    """The meeting point of a group, on loopback, for as long as the returned object lives; the
    port is `store.port`."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        options.size,
        is_master=True,
        timeout=timedelta(seconds=options.timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store's own listener would be on every interface
    )


def connect_store(options: RankOptions, port: int) -> Store:
    """Raises RankLost when nobody listens there."""
    timeout = timedelta(seconds=options.timeout_s)
    try:
        return TCPStore(LOOPBACK, port, timeout=timeout, wait_for_workers=False)
    except RuntimeError as exc:
        raise RankLost(
            f"rank {options.rank} found no rank 0 at port {port}: {exc}; start the group again"
        ) from exc


def join_ranks(options: RankOptions, store: Store) -> TorchRanks:
    """Returns once every rank is here. Raises RankLost."""
    device = torch.device(options.device)
    connect: Callable[..., Any] = _connect_nccl if device.type == "cuda" else _connect_gloo
    try:
        backend = connect(options, store)
    except RuntimeError as exc:
        raise RankLost(
            f"rank {options.rank} of {options.size} could not join its group: {exc}; "
            "start the group again"
        ) from exc
    return TorchRanks(options.rank, options.size, backend, device)


def _connect_gloo(options: RankOptions, store: Store) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    settings = gloo._Options()
    settings._timeout = timedelta(seconds=options.timeout_s)
    settings._devices = [gloo.create_device(interface=LOOPBACK_INTERFACE)]
    return gloo(store, options.rank, options.size, settings)


def _connect_nccl(options: RankOptions, store: Store) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    nccl: Any = dist.ProcessGroupNCCL
    settings = nccl.Options()
    settings._timeout = timedelta(seconds=options.timeout_s)
    torch.cuda.set_device(torch.device(options.device).index or 0)
    return nccl(store, options.rank, options.size, settings)
