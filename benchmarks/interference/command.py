"""Ours with a budget for the time of a step, vLLM with the small chunk that serves it best here."""

import argparse
import statistics
from collections.abc import Iterator

from benchmarks.engine.job import Outcome
from benchmarks.engine.shapes import LLAMA_8B
from benchmarks.engine.side_by_side import SideBySide, name_of, run_side_by_side
from benchmarks.interference.case import (
    ITL_P99,
    LONG_TTFT,
    QUIET_ITL_P50,
    SHORT_TTFT_P95,
    InterferenceCase,
)
from benchmarks.results import Row

ITL_BUDGET_MS = 48.0  # a step may take longer than was predicted
OUR_LIMITS = {"itl_budget_ms": ITL_BUDGET_MS, "max_num_batched_tokens": 8192}
PEER_LIMITS = {"max_num_batched_tokens": 2048}
METRICS = {
    ITL_P99: "99th percentile of the gaps of 16 streams during a fresh 128K prompt",
    SHORT_TTFT_P95: "95th percentile of the wait of 200-token prompts, one every 0.5 s",
    LONG_TTFT: "time to first token of the 128K prompt",
    QUIET_ITL_P50: "median gap of the 16 streams before it",
}
BARS_MS = {ITL_P99: 50.0, SHORT_TTFT_P95: 500.0}
MIN_LONG_RATIO = 1 / 1.5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interference", description=__doc__)
    return run_side_by_side("benchmarks.interference", parser, steps, rows_of)


def steps(run: SideBySide) -> Iterator[None]:
    run.measure("flashray", LLAMA_8B, [InterferenceCase()], **OUR_LIMITS)
    yield
    run.measure("vllm", LLAMA_8B, [InterferenceCase()], **PEER_LIMITS)
    yield


def rows_of(run: SideBySide) -> Iterator[Row]:
    """Medians of the runs."""
    ours = run.outcomes.get(name_of("flashray", LLAMA_8B))
    peer = run.outcomes.get(name_of("vllm", LLAMA_8B))
    if ours is not None:
        yield from outcome_rows(ours, peer)


def outcome_rows(ours: Outcome, peer: Outcome | None) -> Iterator[Row]:
    for name, metric in METRICS.items():
        if name not in ours.samples:
            continue
        theirs = peer.samples.get(name) if peer else None
        is_long = name == LONG_TTFT
        yield Row(
            name,
            metric,
            "ms",
            "lower",
            statistics.median(ours.samples[name]),
            peer.engine if peer else None,
            statistics.median(theirs) if theirs else None,
            MIN_LONG_RATIO if is_long else BARS_MS.get(name),
            "ratio" if is_long else "value",
        )
