"""`python -m benchmarks.kernels --sha SHA --out FILE` on a GPU host, in some five minutes.

Such a host may have no git: the caller says which commit it copied there. No numbers without green
tests of the same kernels, from the same bundle, on the same GPU.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.command import Progress, table
from benchmarks.errors import BenchmarkError, MeasurementFailed
from benchmarks.gpu_results import write_gpu_results
from benchmarks.kernels.attention import ATTENTION_KNOBS, attention_cases
from benchmarks.kernels.case import Case
from benchmarks.kernels.fp8 import fp8_cases
from benchmarks.kernels.gate import require_green
from benchmarks.kernels.image import IMAGE_KNOBS, image_cases
from benchmarks.kernels.language import language_cases
from benchmarks.kernels.linear import linear_cases
from benchmarks.kernels.measure import rows_of
from benchmarks.kernels.prefill_attention import PREFILL_KNOBS, prefill_cases
from benchmarks.kernels.sampling import SAMPLING_KNOBS, sampling_cases
from benchmarks.kernels.tiers import tier_cases
from benchmarks.kernels.timing import copy_bytes_per_us
from benchmarks.kernels.tune import KNOBS, tune
from benchmarks.results import Row


def main() -> int:
    arguments = _arguments()
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {message}", file=sys.stderr, flush=True)

    if not torch.cuda.is_available():
        print("expected a CUDA device, found none", file=sys.stderr)
        return 1
    try:
        if arguments.tune:
            _tune(arguments.only, progress)
            return 0
        if arguments.out is not None:
            progress("gate: the GPU tests")
            require_green()
        failed: dict[str, str] = {}
        rows = list(_measure(arguments.only, failed, progress))
    except BenchmarkError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    print(table([replace(row, case=f"{row.case}: {row.peer or row.metric}") for row in rows]))
    if arguments.out is not None:
        _write(arguments.out, arguments.sha, rows, failed)
        progress(f"wrote {arguments.out}")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--sha", help="the commit that is measured; goes into the file")
    parser.add_argument("--out", type=Path, help="the file; without it nothing is gated or written")
    parser.add_argument("--only", action="append", help="this case and its other sizes; repeatable")
    parser.add_argument("--tune", action="store_true", help="time other forms of the kernels")
    arguments = parser.parse_args()
    if arguments.out is not None and (arguments.sha is None or arguments.tune):
        parser.error("--out needs --sha, and cannot be had with --tune")
    return arguments


def _cases(only: Sequence[str] | None) -> Iterator[Case]:
    for case in (
        *language_cases(),
        *linear_cases(),
        *fp8_cases(),
        *attention_cases(),
        *prefill_cases(),
        *sampling_cases(),
        *tier_cases(),
        *image_cases(),
    ):
        if only is None or case.name.partition(",")[0] in only:
            yield case


def _measure(
    only: Sequence[str] | None, failed: dict[str, str], progress: Progress
) -> Iterator[Row]:
    """A case whose result is wrong has no numbers, and goes into `failed`; the others stand."""
    ceiling = copy_bytes_per_us()
    yield Row("device copy", "bytes read and written", "TB/s", "higher", ceiling / 1e6)
    for case in _cases(only):
        try:
            yield from rows_of(case, ceiling, progress)
        except MeasurementFailed as exc:
            failed[case.name] = str(exc)
            progress(str(exc))
        torch.cuda.empty_cache()


def _tune(only: Sequence[str] | None, progress: Progress) -> None:
    ceiling = copy_bytes_per_us()
    knobs = KNOBS | ATTENTION_KNOBS | PREFILL_KNOBS | SAMPLING_KNOBS | IMAGE_KNOBS
    for case in _cases(only):
        if case.name in knobs:
            print(tune(case, knobs[case.name], ceiling, progress), flush=True)
            torch.cuda.empty_cache()


def _write(file: Path, sha: str, rows: Sequence[Row], failed: Mapping[str, str]) -> None:
    command = f"python -m benchmarks.kernels --sha {sha} --out {file.name}"
    shapes = {case.name: case.shape for case in _cases(None)}
    write_gpu_results(file, sha, command, rows, {"shapes": shapes, "failed": failed})


if __name__ == "__main__":
    sys.exit(main())
