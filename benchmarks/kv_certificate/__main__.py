"""`python -m benchmarks.kv_certificate --model FOLDER --sha SHA --out FILE` on a GPU host, in about
two minutes.

Such a host may have no git: the caller says which commit it copied there. No numbers without green
tests of the same kernels, from the same bundle, on the same GPU.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.command import table
from benchmarks.errors import BenchmarkError
from benchmarks.gpu_results import write_gpu_results
from benchmarks.kernels.gate import require_green
from benchmarks.kv_certificate.cases import NAMES, Certificate

GATE = "test_tiered_skip.py"


def main() -> int:
    prog = "python -m benchmarks.kv_certificate"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--model", type=Path, help="a model folder, for captured attention")
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
    certificate = Certificate(progress, arguments.model)
    try:
        if arguments.out is not None:
            progress(f"gate: {GATE}")
            require_green(GATE)
        measured = []
        for row in certificate.rows(arguments.only):
            measured.append(row)
            print(table(measured[-1:]), flush=True)
    except BenchmarkError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    if arguments.out is not None:
        command = f"python -m benchmarks.kv_certificate --model FOLDER --sha {arguments.sha}"
        command += f" --out {arguments.out.name}"
        write_gpu_results(arguments.out, arguments.sha, command, measured, certificate.more)
        progress(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
