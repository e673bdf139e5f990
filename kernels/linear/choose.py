"""What multiplies by the weights of a model fastest, a form of the kernels or cuBLAS: timed on the
model's own GPU and weights, in CUDA graphs, with none of them in the L2."""

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from kernels.linear import reference
from kernels.linear.api import (
    LINEARS,
    SILU_MULS,
    Form,
    LinearPlan,
    PackedLinear,
    linear,
    linear_silu_mul,
    multiply,
)

FEW_ROWS = 8  # up to which a kernel of as many multiplies fewer in the same time
MAX_CALLS = 32
COLD_BYTES = 2**30  # of a graph at most: many times the L2
REPLAYS = 5

Product = Callable[[PackedLinear], torch.Tensor]
Time = Callable[[Product, Sequence[PackedLinear]], float]

logger = logging.getLogger(__name__)


def graph_us(product: Product, weights: Sequence[PackedLinear]) -> float:
    """Median microseconds of a product within a CUDA graph that goes through the weights in turn,
    as a step through its layers."""
    num_calls = min(MAX_CALLS, max(2, COLD_BYTES // weights[0].weight.nbytes))
    calls = [weights[index % len(weights)] for index in range(num_calls)]
    stream, graph = _stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        product(calls[0])
        graph.capture_begin(capture_error_mode="thread_local")
        kept = [product(each) for each in calls]
        graph.capture_end()
        graph.replay()
        times = [_elapsed_us(graph) for _ in range(REPLAYS)]
    del kept
    return statistics.median(times) / num_calls


def choose_linears(
    linears: Iterable[PackedLinear],
    gate_ups: Iterable[PackedLinear] = (),
    time_us: Time = graph_us,
) -> None:
    """Sets the plans of weights on a GPU, of gate_ups for `linear_silu_mul` too. Weights of one
    shape are taken to be those of the layers, read one after the other. Takes about a second.

    Without it, and for what the kernels do not take (float32, sizes that 16 does not divide),
    cuBLAS multiplies.
    """
    gate_ups = list(gate_ups)
    for alike in _by_shape([*linears, *gate_ups], multiple=16):
        for each in alike:
            each.plan = LinearPlan()
        forms = _fastest("linear", alike, LINEARS, linear, time_us)
        for each in alike:
            each.plan = LinearPlan(linears=forms)
    for alike in _by_shape(gate_ups, multiple=32):
        forms = _fastest("linear_silu_mul", alike, SILU_MULS, linear_silu_mul, time_us)
        for each in alike:
            each.plan = replace(each.plan, silu_muls=forms)


def _by_shape(linears: Iterable[PackedLinear], multiple: int) -> Iterable[list[PackedLinear]]:
    """Those that the kernels take: `multiple` divides their outputs, and 16 their inputs."""
    found: dict[tuple[object, ...], list[PackedLinear]] = {}
    for each in linears:
        weight = each.weight
        is_aligned = weight.shape[0] % multiple == weight.shape[1] % 16 == 0
        if not each.is_packed and weight.dtype in reference.NARROW and is_aligned:
            alike = (weight.shape, weight.dtype, weight.device, each.out_dtype)
            found.setdefault(alike, []).append(each)
    return found.values()


def _fastest(
    name: str,
    weights: Sequence[PackedLinear],
    forms: Sequence[Form],
    plain: Callable[[torch.Tensor, PackedLinear], torch.Tensor],
    time_us: Time,
) -> dict[int, Form]:
    """By number of rows: the forms that are faster than what runs without them."""
    chosen: dict[int, Form] = {}
    weight, said = weights[0].weight, []
    forms = [form for form in forms if form.shared_bytes <= _shared_bytes(weight.device)]
    for num_rows in sorted({1, 2, 4, *(form.max_rows for form in forms)}):
        x = torch.randn(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        best_us = plain_us = time_us(partial(plain, x), weights)
        for form in forms:
            if num_rows <= form.max_rows <= max(num_rows, FEW_ROWS):
                form_us = time_us(partial(multiply, form, x), weights)
                if form_us < best_us:
                    best_us, chosen[num_rows] = form_us, form
        said.append(f"{num_rows}: {best_us:.1f} ({plain_us:.1f})")
    shape = "x".join(map(str, weight.shape))
    logger.info("%s %s: us by rows (without the kernels): %s", name, shape, ", ".join(said))
    return chosen


def _shared_bytes(device: torch.device) -> float:
    """What a program may have."""
    if device.type != "cuda":
        return math.inf
    properties: Any = torch.cuda.get_device_properties(device)
    has: int = properties.shared_memory_per_block_optin
    return has


@cache
def _stream() -> torch.cuda.Stream:
    """One, for cuBLAS keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream()


def _elapsed_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return 1000 * elapsed_ms
