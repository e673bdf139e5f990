"""What every benchmark's command line shares: gate, measure, print, write."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

from benchmarks.errors import BenchmarkError
from benchmarks.results import Recording, Row

Progress = Callable[[str], None]
Measure = Callable[[Progress], list[Row]]


def run_benchmark(
    name: str, gate: Sequence[str], measure: Measure, packages: Sequence[str], module: str
) -> int:
    """The exit status: 0, or 1 when a gate was red or something could not be measured."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=__doc__)
    parser.add_argument(
        "--allow-dirty", action="store_true", help="write the sha of uncommitted code with +dirty"
    )
    parser.add_argument(
        "--no-write", action="store_true", help="measure and print, without gate or results file"
    )
    arguments = parser.parse_args()
    progress = _progress()
    try:
        if arguments.no_write:
            print(table(measure(progress)))
            return 0
        progress(f"gate: {' '.join(gate)}")
        recording = Recording.open(name, gate, allow_dirty=arguments.allow_dirty)
        rows = measure(progress)
        print(table(rows))
        file = recording.write(rows, _versions(packages), f"python -m {module}")
        progress(f"wrote {file}")
    except BenchmarkError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    return 0


def table(rows: Sequence[Row]) -> str:
    """One line a row, for people."""
    lines = [f"{'case':34} {'ours':>10} {'peer':>10} {'unit':8} {'ratio':>6}  bar"]
    for row in rows:
        peer = "-" if row.peer_value is None else f"{row.peer_value:.2f}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = {None: "", True: "met", False: "MISSED"}[row.meets_floor]
        bar = "" if row.floor is None else f"{row.floor:g} ({row.floor_of}) {verdict}"
        lines.append(f"{row.case:34} {row.ours:10.2f} {peer:>10} {row.unit:8} {ratio:>6}  {bar}")
    return "\n".join(lines)


def _versions(packages: Sequence[str]) -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, **{package: version(package) for package in packages}}


def _progress() -> Progress:
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {message}", file=sys.stderr, flush=True)

    return progress
