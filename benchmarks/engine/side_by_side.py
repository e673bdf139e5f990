"""Ours and vLLM one after the other on one GPU, on random weights of a shape: the frame of the
benchmarks that step engines."""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.command import Progress, table
from benchmarks.engine.cases import Case, described
from benchmarks.engine.gpu_process import GpuProcesses, require_idle_gpu
from benchmarks.engine.job import KILL_AFTER_S, MAX_MODEL_LEN, Job, Outcome, run_job
from benchmarks.engine.parity import require_parity
from benchmarks.engine.shapes import Shape
from benchmarks.errors import BenchmarkError, MeasurementFailed
from benchmarks.gpu_results import write_gpu_results
from benchmarks.results import Row

PEER = "vllm"
SECONDS = {"flashray": 120.0, PEER: 200.0}  # of one process, its start included
MIN_JOB_S = 15.0

Engine = Literal["flashray", "vllm"]


@dataclass(slots=True)
class SideBySide:
    """What the engines were told and what came of it, by `name_of`."""

    arguments: argparse.Namespace
    progress: Progress
    processes: GpuProcesses = field(default_factory=GpuProcesses)
    jobs: list[Job] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)

    def measure(
        self,
        engine: Engine,
        shape: Shape,
        cases: Sequence[Case],
        variant: str | None = None,
        **limits: Any,
    ) -> None:
        """What fails is said, and the next is measured all the same. A peer that is not wanted or
        not there is left out."""
        is_there = self.arguments.peer == PEER and importlib.util.find_spec(PEER) is not None
        if engine == PEER and not is_there:
            return
        name = name_of(engine, shape, variant=variant)
        if name in self.outcomes or name in self.failed:
            name = name_of(engine, shape, again=True, variant=variant)
        try:
            seconds = self.seconds_for(engine)
            require_idle_gpu()
            with tempfile.TemporaryDirectory(prefix="flashray-shape-") as folder:
                longest = max(2 * MAX_MODEL_LEN, limits.get("max_model_len", 0))
                model = shape.write(Path(folder), longest)
                told = tuple(described(case) for case in cases)
                job = Job(engine, str(model), told, seconds, self.arguments.repeats, **limits)
                self.jobs.append(job)
                self.progress(f"{name}: {', '.join(case.name for case in cases)}")
                self.outcomes[name] = run_job(job, self.processes, self.progress)
        except MeasurementFailed as exc:
            self.failed[name] = str(exc)
            self.progress(f"{name}: {exc}")

    def seconds_for(self, engine: Engine) -> float:
        """Until no sample starts any more. Raises MeasurementFailed when none could."""
        given = self.arguments.seconds if engine == "flashray" else self.arguments.peer_seconds
        seconds: float = given or SECONDS[engine]
        if self.arguments.total_seconds is not None:
            spent_s = time.monotonic() - self.started_s
            seconds = min(seconds, self.arguments.total_seconds - spent_s - KILL_AFTER_S)
        if self.processes.is_stopped or seconds < MIN_JOB_S:
            raise MeasurementFailed("out of time")
        return seconds

    def more(self) -> dict[str, object]:
        """For the file."""
        cases = {each["name"]: each for job in self.jobs for each in job.cases}
        broken = {name: each.failed for name, each in self.outcomes.items() if each.failed}
        return {
            "method": "timed at the engine's step(), one process an engine; medians of samples",
            "cases": cases,
            "jobs": [json.loads(replace(job, cases=()).to_json()) for job in self.jobs],
            "engines": {name: each.facts for name, each in self.outcomes.items()},
            "kernels": self.kernels,
            "samples": {name: each.samples for name, each in self.outcomes.items()},
            "failed": self.failed | broken,
        }


Steps = Callable[[SideBySide], Iterator[None]]
Rows = Callable[[SideBySide], Iterator[Row]]
Gate = Callable[[SideBySide], None]  # raises GateRed


def name_of(engine: Engine, shape: Shape, again: bool = False, variant: str | None = None) -> str:
    """`variant`: how the engine is set up, where it is not as always."""
    who = engine if variant is None else f"{engine} {variant}"
    return f"{who}, {shape.name}{', again' if again else ''}"


def parity_gate(run: SideBySide) -> None:
    run.progress("gate: parity")
    require_parity(run.arguments.parity, run.arguments.sha, run.processes, run.progress)


def run_side_by_side(
    module: str,
    parser: argparse.ArgumentParser,
    steps: Steps,
    rows_of: Rows,
    gate: Gate = parity_gate,
) -> int:
    """Write the rows of what there is after every step. The exit status: 1 when the gate was red,
    somebody else was on the GPU, or something of ours failed."""
    arguments = _arguments(parser)
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {message}", file=sys.stderr, flush=True)

    run = SideBySide(arguments, progress)
    # Files by their names: where they lay on that host says nothing to a reader.
    command = " ".join(("python -m", module, *[Path(each).name for each in sys.argv[1:]]))
    run.processes.stop_on_signals()
    try:
        require_idle_gpu()
        if arguments.out is not None:
            gate(run)
    except BenchmarkError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    rows: list[Row] = []
    for _ in steps(run):
        rows = list(rows_of(run))
        if arguments.out is not None and rows:
            write_gpu_results(arguments.out, arguments.sha, command, rows, run.more())
            progress(f"wrote {arguments.out}")
    print(table([replace(row, case=f"{row.case}: {_kind(row)}") for row in rows]))
    for name, why in run.failed.items():
        print(f"{name}: {why}")
    return 1 if any(name.startswith("flashray") for name in run.failed) else 0


def _kind(row: Row) -> str:
    return "share" if row.unit == "1" else "alone" if row.peer is None else "beside"


def _arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--sha", help="the commit that is measured; goes into the file")
    parser.add_argument("--out", type=Path, help="the file; without it nothing is gated or written")
    parser.add_argument("--peer", choices=(PEER, "none"), default=PEER)
    parser.add_argument("--repeats", type=int, default=3, help="samples of a case; medians count")
    parser.add_argument("--parity", type=Path, help="a file of benchmarks.engine.parity, as gate")
    parser.add_argument("--seconds", type=float, help="for one process of ours, start included")
    parser.add_argument("--peer-seconds", type=float, help="for one process of the peer")
    parser.add_argument("--total-seconds", type=float, help="for all of them")
    arguments = parser.parse_args()
    if arguments.out is not None and arguments.sha is None:
        parser.error("--out needs --sha")
    return arguments
