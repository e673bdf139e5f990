"""The cases, with 4-bit cold tokens, then our exact mode and vLLM; and what fits into memory."""

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.engine.cases import Case
from benchmarks.engine.gpu_process import require_idle_gpu
from benchmarks.engine.job import Outcome
from benchmarks.engine.parity import require_parity
from benchmarks.engine.shapes import LLAMA_8B
from benchmarks.engine.side_by_side import Engine, SideBySide, name_of, run_side_by_side
from benchmarks.errors import MeasurementFailed
from benchmarks.interference.case import InterferenceCase
from benchmarks.interference.command import OUR_LIMITS, PEER_LIMITS, outcome_rows
from benchmarks.kv_engine.bars import (
    BESIDE_EXACT,
    CASES,
    EXACT_NAME,
    FITS,
    FP8_PEER_CASES,
    NAMES,
    PEER_CASES,
    capacity_rows,
    engine_rows,
    promised,
)
from benchmarks.kv_engine.capacity import EXACT
from benchmarks.kv_engine.gate import require_green_tiers
from benchmarks.results import Row

COLD_FORMAT = "int4"
MAX_MODEL_LEN = 1_000_000 + 1024
TIERED_LIMITS = {"cold_format": COLD_FORMAT, "max_model_len": MAX_MODEL_LEN}
INTERFERENCE = "interference_tiered"
INTERFERENCE_LIMITS = OUR_LIMITS | {"cold_format": COLD_FORMAT}
TOTAL_S, OUR_S = 480.0, 160.0  # of all, and of one process of ours
CAPACITY_S = 90.0
FP8_PEER_S = 150.0  # less than that is not enough for its start and a case
ALONE = "interference"
TIERED, TIERED_ALONE = COLD_FORMAT, f"{COLD_FORMAT}, {ALONE}"
CAPACITY = "flashray, capacity"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_engine", description=__doc__)
    parser.set_defaults(total_seconds=TOTAL_S, seconds=OUR_S)
    names = (*NAMES, INTERFERENCE)
    parser.add_argument("--only", action="append", choices=names, help="this case; repeatable")
    parser.add_argument(
        "--interference", action="store_true", help=f"and {INTERFERENCE}, which takes minutes more"
    )
    return run_side_by_side("benchmarks.kv_engine", parser, steps, rows_of, gate)


def gate(run: SideBySide) -> None:
    run.progress("gate: kernels and engines of tiers")
    require_green_tiers()
    if run.arguments.parity is not None:
        require_parity(run.arguments.parity, run.arguments.sha, run.processes, run.progress)


def steps(run: SideBySide) -> Iterator[None]:
    wanted = _wanted(run)
    if wanted.intersection(FITS):
        measure_capacity(run)
        yield
    cases = [case for case in CASES if promised(case.name) in wanted]
    if cases:
        yield from _measure(run, "flashray", cases, TIERED, **TIERED_LIMITS)
        exact = [case for case in cases if case.name in BESIDE_EXACT]
        yield from _measure(run, "flashray", exact, EXACT)
        yield from _measure(run, "vllm", _named(cases, PEER_CASES))
    if INTERFERENCE in wanted:
        yield from _interfere(run)
    if cases and has_time(run, FP8_PEER_S):
        yield from _measure(run, "vllm", _named(cases, FP8_PEER_CASES), "fp8", kv_cache_dtype="fp8")


def rows_of(run: SideBySide) -> Iterator[Row]:
    """Of what there is."""
    if (capacity := run.outcomes.get(CAPACITY)) is not None:
        wanted = _wanted(run)
        yield from (row for row in capacity_rows(capacity.facts, EXACT) if row.case in wanted)
    if (tiered := _outcome(run, "flashray", TIERED)) is not None:
        exact, peer = _outcome(run, "flashray", EXACT), _outcome(run, "vllm")
        yield from engine_rows(tiered, exact, peer, _outcome(run, "vllm", "fp8"))
    if (tiered := _outcome(run, "flashray", TIERED_ALONE)) is not None:
        peer = _outcome(run, "vllm", ALONE)
        if peer is None and (exact := _outcome(run, "flashray", f"{EXACT}, {ALONE}")) is not None:
            peer = replace(exact, engine=EXACT_NAME)
        for row in outcome_rows(tiered, peer):
            yield replace(row, case=f"tiered_{row.case}")


def measure_capacity(run: SideBySide) -> None:
    """As `SideBySide.measure`."""
    run.progress(f"{CAPACITY}: {', '.join(FITS)}")
    try:
        seconds = min(CAPACITY_S, run.seconds_for("flashray"))
        require_idle_gpu()
        with TemporaryDirectory(prefix="flashray-capacity-") as folder:
            file = Path(folder, "outcome.json")
            status = run.processes.run("benchmarks.kv_engine.capacity", [str(file)], seconds)
            if file.exists():
                run.outcomes[CAPACITY] = Outcome.read(file)
        if status != 0:
            ended = "was ended" if status is None else f"ended with {status}"
            raise MeasurementFailed(ended)
    except MeasurementFailed as exc:
        run.failed[CAPACITY] = str(exc)
        run.progress(f"{CAPACITY}: {exc}")


def has_time(run: SideBySide, seconds: float) -> bool:
    total_s = run.arguments.total_seconds
    return total_s is None or total_s - (time.monotonic() - run.started_s) >= seconds


def _interfere(run: SideBySide) -> Iterator[None]:
    """Beside vLLM, or else beside our exact mode."""
    cases = [InterferenceCase()]
    yield from _measure(run, "flashray", cases, TIERED_ALONE, **INTERFERENCE_LIMITS)
    yield from _measure(run, "vllm", cases, ALONE, **PEER_LIMITS)
    if _outcome(run, "vllm", ALONE) is None:
        yield from _measure(run, "flashray", cases, f"{EXACT}, {ALONE}", **OUR_LIMITS)


def _measure(
    run: SideBySide,
    engine: Engine,
    cases: list[Case],
    variant: str | None = None,
    **limits: object,
) -> Iterator[None]:
    if cases:
        run.measure(engine, LLAMA_8B, cases, variant, **limits)
        yield


def _outcome(run: SideBySide, engine: Engine, variant: str | None = None) -> Outcome | None:
    return run.outcomes.get(name_of(engine, LLAMA_8B, variant=variant))


def _named(cases: list[Case], names: tuple[str, ...]) -> list[Case]:
    """In the order of the names."""
    by_name = {case.name: case for case in cases}
    return [by_name[name] for name in names if name in by_name]


def _wanted(run: SideBySide) -> set[str]:
    wanted = set(run.arguments.only or NAMES)
    return wanted | {INTERFERENCE} if run.arguments.interference else wanted
