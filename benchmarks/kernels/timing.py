"""How long a call takes on the GPU, without what it costs the host."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

REPLAYS = 15
WANTED_MS = 2.0  # of a graph: many times what its launch costs
MAX_CALLS = 40
CEILING_BYTES = 2**31

Call = Callable[[int], Any]


def graph_us(call: Call) -> float:
    """Median microseconds of a call within a CUDA graph of several: `call(0)`, `call(1)`, ...

    What a call returns is kept, so that no two of a graph store to the same memory.
    """
    num_calls = _num_calls(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(index) for index in range(num_calls)]
    graph.replay()
    times = [_elapsed_us(graph.replay) for _ in range(REPLAYS)]
    del kept, graph
    return statistics.median(times) / num_calls


def stream_us(call: Call) -> float:
    """The same for calls that cannot be captured: back to back on the stream, host time as well
    where that is longer."""
    num_calls = _num_calls(call)

    def calls() -> None:
        for index in range(num_calls):
            call(index)

    return statistics.median(_elapsed_us(calls) for _ in range(REPLAYS)) / num_calls


def copy_bytes_per_us() -> float:
    """The ceiling: bytes read and written by a large copy within the device."""
    source = torch.randint(256, (CEILING_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = [_elapsed_us(lambda: target.copy_(source)) for _ in range(REPLAYS)]
    return 2 * CEILING_BYTES / statistics.median(times)


def _num_calls(call: Call) -> int:
    """So many that they take about WANTED_MS; they have run when this returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(3):
            call(index)
        once_us = statistics.median(_elapsed_us(lambda: call(0)) for _ in range(5))
    torch.cuda.current_stream().wait_stream(stream)
    return max(2, min(MAX_CALLS, int(1000 * WANTED_MS / once_us)))


def _elapsed_us(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end)
