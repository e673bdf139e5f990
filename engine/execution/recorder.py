"""What is launched again and again as one: CUDA graphs."""

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UP_RUNS = 2  # what is loaded or chosen at a first call must not be captured

Results = tuple[torch.Tensor, ...]


class Recorder(Protocol):
    def record(self, compute: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        """The results of `compute`, and what computes them again, into the same tensors: as long
        as somebody keeps these, their memory is nobody else's."""


class GraphRecorder:
    """CUDA graphs that share one pool of memory: the first should be the largest. They run one at
    a time, on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, compute: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        """Not by `torch.cuda.graph`, which gives all unused memory back before each graph."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP_RUNS):
                compute()
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool)
            try:
                results = compute()
            finally:
                graph.capture_end()
        return results, graph.replay
