"""Ours and vLLM one after the other on one GPU, on random weights of a shape: the frame of the
benchmarks that step engines."""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.command import Progress, table
from benchmarks.engine.cases import Case, described
from benchmarks.engine.job import MAX_MODEL_LEN, Job, Outcome, run_job
from benchmarks.engine.parity import require_parity
from benchmarks.engine.shapes import Shape
from benchmarks.errors import BenchmarkError, MeasurementFailed
from benchmarks.gpu_results import write_gpu_results
from benchmarks.results import Row

PEER = "vllm"
SECONDS = {"flashray": 120.0, PEER: 200.0}  # of one process, its start included


@dataclass(slots=True)
class SideBySide:
    """What the engines were told and what came of it."""

    arguments: argparse.Namespace
    progress: Progress
    jobs: list[Job] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by engine and shape
    failed: dict[str, str] = field(default_factory=dict)

    def ours(self, shape: Shape, cases: Sequence[Case], **limits: Any) -> Outcome | None:
        """None when it did not come to a first token: the other is measured all the same."""
        return self._outcome("flashray", shape, cases, limits)

    def peer(self, shape: Shape, cases: Sequence[Case], **limits: Any) -> Outcome | None:
        """None also without a peer."""
        wanted = self.arguments.peer == PEER
        if not wanted or importlib.util.find_spec(PEER) is None:
            return None
        return self._outcome("vllm", shape, cases, limits)

    def more(self) -> dict[str, object]:
        """For the file."""
        cases = {each["name"]: each for job in self.jobs for each in job.cases}
        broken = {name: each.failed for name, each in self.outcomes.items() if each.failed}
        return {
            "method": "timed at the engine's step(), one process an engine; medians of samples",
            "cases": cases,
            "jobs": [json.loads(replace(job, cases=()).to_json()) for job in self.jobs],
            "engines": {name: each.facts for name, each in self.outcomes.items()},
            "samples": {name: each.samples for name, each in self.outcomes.items()},
            "failed": self.failed | broken,
        }

    def _outcome(
        self,
        engine: Literal["flashray", "vllm"],
        shape: Shape,
        cases: Sequence[Case],
        limits: dict[str, Any],
    ) -> Outcome | None:
        given = self.arguments.seconds if engine == "flashray" else self.arguments.peer_seconds
        name = f"{engine}, {shape.name}"
        if name in self.outcomes or name in self.failed:
            name += ", again"
        with tempfile.TemporaryDirectory(prefix="flashray-shape-") as folder:
            model = shape.write(Path(folder), 2 * MAX_MODEL_LEN)
            told = tuple(described(case) for case in cases)
            seconds = given or SECONDS[engine]
            job = Job(engine, str(model), told, seconds, self.arguments.repeats, **limits)
            self.jobs.append(job)
            self.progress(f"{name}: {', '.join(case.name for case in cases)}")
            try:
                self.outcomes[name] = run_job(job, self.progress)
            except MeasurementFailed as exc:
                self.failed[name] = str(exc)
                self.progress(f"{name}: {exc}")
        return self.outcomes.get(name)


Measure = Callable[[SideBySide], Iterable[Row]]


def run_side_by_side(module: str, parser: argparse.ArgumentParser, measure: Measure) -> int:
    """The exit status: 1 when the gate was red or ours did not come to its numbers."""
    arguments = _arguments(parser)
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {message}", file=sys.stderr, flush=True)

    run = SideBySide(arguments, progress)
    try:
        if arguments.out is not None:
            progress("gate: parity")
            require_parity(arguments.parity, arguments.sha, progress)
        rows = list(measure(run))
    except BenchmarkError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    print(table([replace(row, case=f"{row.case}: {_kind(row)}") for row in rows]))
    for name, why in run.failed.items():
        print(f"{name}: {why}")
    if arguments.out is not None:
        command = f"python -m {module} {' '.join(sys.argv[1:])}"
        write_gpu_results(arguments.out, arguments.sha, command, rows, run.more())
        progress(f"wrote {arguments.out}")
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
    arguments = parser.parse_args()
    if arguments.out is not None and arguments.sha is None:
        parser.error("--out needs --sha")
    return arguments
