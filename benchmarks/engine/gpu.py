"""`python -m benchmarks.engine.gpu --sha SHA --out FILE` on a GPU host, in some six minutes.

Ours and vLLM one after the other on random weights, each in a process of its own, timed at the
engine's step(); the same prompt lengths, the same bytes for keys and values, CUDA graphs on. No
numbers unless our engine's tokens are right on the same GPU (`benchmarks.engine.parity`).
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.engine import attention
from benchmarks.engine.bars import (
    MEASURES,
    START,
    Measure,
    attention_rows,
    engine_rows,
    roofline_row,
    start_rows,
)
from benchmarks.engine.shapes import LLAMA_8B, SMOLLM2_135M, Shape
from benchmarks.engine.side_by_side import Engine, SideBySide, name_of, run_side_by_side
from benchmarks.results import Row

CASES = (*(measure.case.name for measure in MEASURES), *attention.CASES, START)
LIMITS: Mapping[str, dict[str, int]] = {
    LLAMA_8B.name: {},
    SMOLLM2_135M.name: {"max_model_len": 8192, "kv_cache_bytes": 4 << 30},
}
ATTENTION_S = 90
ENGINES: tuple[Engine, Engine] = ("flashray", "vllm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.gpu", description=__doc__)
    parser.add_argument("--only", type=_names, default=CASES, help=f"of {','.join(CASES)}")
    return run_side_by_side("benchmarks.engine.gpu", parser, steps, rows_of)


def steps(run: SideBySide) -> Iterator[None]:
    """What is dearest to know comes first, in case the time runs out."""
    measure_attention(run)
    yield
    for shape in (LLAMA_8B, SMOLLM2_135M):
        cases = [measure.case for measure in _chosen(run, shape)]
        if cases or (shape is LLAMA_8B and START in run.arguments.only):
            for engine in ENGINES:
                run.measure(engine, shape, cases, **LIMITS[shape.name])
                yield
    if START in run.arguments.only:
        run.measure("flashray", LLAMA_8B, [])
        yield


def rows_of(run: SideBySide) -> Iterator[Row]:
    kernels = dict(run.kernels)
    copy_bytes_per_us = kernels.pop("copy_bytes_per_us", None)
    yield from attention_rows(kernels)
    for shape in (LLAMA_8B, SMOLLM2_135M):
        ours, peer = (run.outcomes.get(name_of(engine, shape)) for engine in ENGINES)
        if ours is None:
            continue
        for measure in _chosen(run, shape):
            rows = list(engine_rows(measure, ours, peer))
            yield from rows
            if rows and copy_bytes_per_us is not None:
                yield from roofline_row(measure, rows[0], copy_bytes_per_us)
        if shape is LLAMA_8B and START in run.arguments.only:
            again = run.outcomes.get(name_of("flashray", shape, again=True))
            yield from start_rows(ours, again, peer)
    if copy_bytes_per_us is not None:
        rate = copy_bytes_per_us / 1e6
        yield Row("device copy", "bytes read and written", "TB/s", "higher", rate)


def measure_attention(run: SideBySide) -> None:
    """And the copy rate, whatever the cases."""
    names = [name for name in attention.CASES if name in run.arguments.only]
    run.progress(f"copy rate, {', '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="flashray-attention-") as folder:
        file = Path(folder, "attention.json")
        status = run.processes.run("benchmarks.engine.attention", [str(file), *names], ATTENTION_S)
        if status != 0:
            ended = "was ended" if status is None else f"ended with {status}"
            run.failed["flashray, attention kernels"] = ended
        if file.exists():
            run.kernels = json.loads(file.read_text())


def _chosen(run: SideBySide, shape: Shape) -> list[Measure]:
    return [
        each for each in MEASURES if each.shape is shape and each.case.name in run.arguments.only
    ]


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; know {', '.join(CASES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
