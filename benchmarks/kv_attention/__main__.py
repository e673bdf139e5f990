"""`python -m benchmarks.kv_attention --sha SHA --out FILE` on a GPU host, in about a minute.

Such a host may have no git: the caller says which commit it copied there. No numbers without green
tests of the same kernel, from the same bundle, on the same GPU.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.command import table
from benchmarks.errors import BenchmarkError
from benchmarks.gpu_results import write_gpu_results
from benchmarks.kernels.gate import require_green
from benchmarks.kv_attention.cases import NAMES, SPEEDS, rows
from benchmarks.results import Row

GATE = "test_tiered_decode.py"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_attention", description=__doc__)
    parser.add_argument("--sha", help="the commit that is measured; goes into the file")
    parser.add_argument("--out", type=Path, help="the file; without it nothing is gated or written")
    parser.add_argument("--only", action="append", choices=NAMES, help="this case; repeatable")
    arguments = parser.parse_args()
    if arguments.out is not None and arguments.sha is None:
        parser.error("--out needs --sha")
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {message}", file=sys.stderr, flush=True)

    if not torch.cuda.is_available():
        print("expected a CUDA device, found none", file=sys.stderr)
        return 1
    try:
        if arguments.out is not None:
            progress(f"gate: {GATE}")
            require_green(GATE)
        measured = list(rows(arguments.only, progress))
    except BenchmarkError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    print(table(measured))
    if arguments.out is not None:
        _write(arguments.out, arguments.sha, measured)
        progress(f"wrote {arguments.out}")
    return 0


def _write(file: Path, sha: str, measured: Sequence[Row]) -> None:
    command = f"python -m benchmarks.kv_attention --sha {sha} --out {file.name}"
    shapes = {each.name: f"{each.batch} x {each.context_len}, {each.formats}" for each in SPEEDS}
    try:
        peers = {"vllm": version("vllm")}
    except PackageNotFoundError:
        peers = {}
    write_gpu_results(file, sha, command, measured, {"shapes": shapes, "peers": peers})


if __name__ == "__main__":
    sys.exit(main())
