"""The rows of a case: ours and its peers in the same run, behind a check of the result."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.command import Progress
from benchmarks.errors import MeasurementFailed
from benchmarks.kernels.case import Arguments, Case
from benchmarks.kernels.timing import graph_us, stream_us
from benchmarks.results import Row

MIN_CEILING_SHARE = 0.85
COMPILED, EAGER = "torch.compile", "torch eager"


def rows_of(case: Case, copy_bytes_per_us: float, progress: Progress) -> Iterator[Row]:
    """Times are microseconds a unit: a page, or the whole call. Raises MeasurementFailed."""
    unit = "us" if case.units == 1 else "us/page"
    case.check(case.ours)
    sets = case.argument_sets()
    ours_us = _time(case, case.ours, sets)
    progress(f"{case.name}: {ours_us:.2f} {unit}")
    for peer, peer_us in peer_times(case, sets, progress):
        yield Row(case.name, "time", unit, "lower", ours_us, peer, peer_us, **_bar(case, peer))
    moved = case.num_bytes / case.units
    yield Row(case.name, "bytes moved", "MB", "lower", moved / 1e6)
    if case.is_large:
        share = moved / ours_us / copy_bytes_per_us
        floor = MIN_CEILING_SHARE if case.bar_us is None else None
        yield Row(case.name, "share of the copy ceiling", "1", "higher", share, floor=floor)


def _bar(case: Case, peer: str) -> dict[str, Any]:
    """Held once a case: a page to its time, a large call to torch.compile."""
    if peer != COMPILED or not case.is_large:
        return {}
    if case.bar_us is not None:
        return {"floor": case.bar_us}
    return {"floor": 1.0, "floor_of": "ratio"}


def peer_times(
    case: Case, sets: list[Arguments], progress: Progress
) -> Iterator[tuple[str, float | None]]:
    """None of a peer that fails: its row says that nothing was measured beside."""
    torch._dynamo.reset()
    compiled = torch.compile(case.plain, dynamic=False, fullgraph=True)
    timed = {COMPILED: (compiled, graph_us), EAGER: (case.plain, graph_us)}
    for name, peer in case.peers.items():
        if name.startswith("torch."):
            timed[name] = (peer, graph_us)
        elif importlib.util.find_spec(name) is not None:
            timed[name] = (peer, stream_us)
    for name, (run, timer) in timed.items():
        try:
            yield name, _time(case, run, sets, timer)
        except MeasurementFailed as exc:
            progress(f"{name}: {exc}")
            yield name, None


def _time(
    case: Case,
    run: Callable[..., Any],
    sets: list[Arguments],
    timed: Callable[[Callable[[int], Any]], float] = graph_us,
) -> float:
    try:
        return timed(lambda index: run(*sets[index % len(sets)])) / case.units
    except RuntimeError as exc:
        raise MeasurementFailed(f"{case.name} ({case.shape}): {exc}") from exc
