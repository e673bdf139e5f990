"""`python -m benchmarks.engine.gpu --sha SHA --out FILE` on a GPU host, in some six minutes.

Ours and vLLM one after the other on random weights, each in a process of its own, timed at the
engine's step(); the same prompt lengths, the same bytes for keys and values, CUDA graphs on. No
numbers unless our engine's tokens are right on the same GPU (`benchmarks.engine.parity`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine import attention
from benchmarks.engine.bars import (
    MEASURES,
    START,
    attention_rows,
    engine_rows,
    roofline_row,
    start_rows,
)
from benchmarks.engine.shapes import LLAMA_8B, SMOLLM2_135M
from benchmarks.engine.side_by_side import SideBySide, run_side_by_side
from benchmarks.results import ROOT, Row

CASES = (*(measure.case.name for measure in MEASURES), *attention.CASES, START)
LIMITS: Mapping[str, dict[str, int]] = {
    LLAMA_8B.name: {},
    SMOLLM2_135M.name: {"max_model_len": 8192, "kv_cache_bytes": 4 << 30},
}
ATTENTION_S = 120


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.gpu", description=__doc__)
    parser.add_argument("--only", type=_names, default=CASES, help=f"of {','.join(CASES)}")
    return run_side_by_side("benchmarks.engine.gpu", parser, _measure)


def _measure(run: SideBySide) -> Iterator[Row]:
    chosen = run.arguments.only
    kernels = _attention(run, [name for name in attention.CASES if name in chosen])
    copy_bytes_per_us = kernels.pop("copy_bytes_per_us", None)
    yield from attention_rows(kernels)
    for shape in (LLAMA_8B, SMOLLM2_135M):
        measures = [each for each in MEASURES if each.shape is shape and each.case.name in chosen]
        is_started = shape is LLAMA_8B and START in chosen
        if not measures and not is_started:
            continue
        cases = [measure.case for measure in measures]
        ours = run.ours(shape, cases, **LIMITS[shape.name])
        peer = run.peer(shape, cases, **LIMITS[shape.name])
        if ours is None:
            continue
        for measure in measures:
            rows = list(engine_rows(measure, ours, peer))
            yield from rows
            if rows and copy_bytes_per_us is not None:
                yield from roofline_row(measure, rows[0], copy_bytes_per_us)
        if is_started:
            yield from start_rows(ours, run.ours(shape, []), peer)
    if copy_bytes_per_us is not None:
        rate = copy_bytes_per_us / 1e6
        yield Row("device copy", "bytes read and written", "TB/s", "higher", rate)


def _attention(run: SideBySide, names: list[str]) -> dict[str, Any]:
    """The copy rate, whatever the names. Empty when the process failed: the engines go on."""
    run.progress(f"copy rate, {', '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="flashray-attention-") as folder:
        file = Path(folder, "attention.json")
        command = [sys.executable, "-m", "benchmarks.engine.attention", str(file), *names]
        try:
            ran = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, timeout=ATTENTION_S)
        except subprocess.TimeoutExpired:
            run.failed["flashray, attention"] = f"took longer than {ATTENTION_S} s"
            return {}
        if ran.returncode:
            run.failed["flashray, attention"] = f"ended with {ran.returncode}"
            return {}
        measured: dict[str, Any] = json.loads(file.read_text())
        return measured


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; know {', '.join(CASES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
