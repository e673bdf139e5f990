"""`python -m benchmarks.soak --device cpu|cuda:0 --minutes N [--tiers FORMAT] [--out FILE]`: mixed
random load in one engine, its books checked after every step. The exit status is 1 where a bar was
missed.

On a CPU the built-in model, or with tiers four layers of its shape, for references of kernels are
slow; on a GPU the shape of Llama 3.1 8B. Shapes have random weights.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.command import Progress, table
from benchmarks.engine.shapes import LLAMA_8B, SMOLLM2_135M, SMOLLM2_SHALLOW
from benchmarks.gpu_results import write_gpu_results
from benchmarks.results import ROOT, Row, cpu_name, describe_tree
from benchmarks.soak.bars import rows_of
from benchmarks.soak.load import Load
from benchmarks.soak.soak import Outcome, Soak
from benchmarks.soak.watch import StepTimes, probe_of
from deployments.errors import ModelFilesError
from deployments.model_files import BUILT_IN_MODEL, prepare_model
from engine.build import build_engine_around, build_model_runner
from engine.cache.formats import BLOCK_SIZE, COLD_FORMATS
from engine.cache.tier_config import TierConfig
from engine.config import CacheConfig, EngineConfig, SchedulerConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """A completion may grow by many blocks, and a sequence is admitted with one to spare: so
    sequences are preempted. `num_blocks` of tokens of `kv_token_bytes`, none of which ages."""

    max_model_len: int
    max_new_tokens: int
    num_blocks: int
    kv_token_bytes: int
    scheduler: SchedulerConfig


ITL_BUDGET_MS = 50.0  # as it is served
CPU = Limits(1024, 256, 24, 2 * SMOLLM2_135M.kv_token_bytes, SchedulerConfig(8, 256))
GPU = Limits(16384, 1536, 500, LLAMA_8B.kv_token_bytes, SchedulerConfig(64, 2048, ITL_BUDGET_MS))
# Where tokens age: contexts in which some are cold. A sequence is admitted with more room to grow,
# so completions are longer and memory is less, for some to be preempted all the same.
TIERED_CPU = replace(
    CPU,
    max_model_len=2048,
    max_new_tokens=768,
    num_blocks=50,
    kv_token_bytes=SMOLLM2_SHALLOW.kv_token_bytes,  # in bfloat16, whatever the model's dtype
)
TIERED_GPU = replace(GPU, num_blocks=300)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiers", choices=COLD_FORMATS, help="let tokens age, until this format")
    parser.add_argument("--sha", help="the commit that is run, where there is no git")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sha = arguments.sha
    if arguments.out is not None and sha is None:
        sha = describe_tree(ROOT)  # now: the tree may change meanwhile
    progress = _progress()
    seconds = arguments.minutes * 60
    outcome = run(arguments.device, seconds, arguments.seed, progress, arguments.tiers)
    rows = list(rows_of(outcome, arguments.device))
    print(table(rows))
    for words in outcome.ledger.shown:
        print(words)
    if arguments.out is not None and sha is not None:
        command = f"python -m benchmarks.soak --device {arguments.device} "
        command += f"--minutes {arguments.minutes:g} --seed {arguments.seed}"
        command += f" --tiers {arguments.tiers}" if arguments.tiers else ""
        write(arguments.out, arguments.device, sha, command, rows, outcome)
        progress(f"wrote {arguments.out}")
    return int(any(row.meets_floor is False for row in rows))


def run(
    device: str, seconds: float, seed: int, progress: Progress, cold_format: str | None = None
) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="flashray-soak-") as scratch:
        config = config_of(device, Path(scratch), progress, cold_format)
        progress("building the engine")
        runner = build_model_runner(config)
        engine = build_engine_around(runner, config)
    limits = limits_of(device, cold_format)
    load = Load(
        limits.max_model_len,
        runner.model_config.vocab_size,
        max_live=2 * limits.scheduler.max_num_sequences,
        max_new_tokens=limits.max_new_tokens,
    )
    lag = 1 if runner.is_asynchronous else 0
    # On a CPU oneDNN keeps what it made for each number of rows it has met: 350 MB in all.
    lengths = range(1, limits.scheduler.max_num_batched_tokens + 1) if device == "cpu" else ()
    probe = probe_of(device)
    progress("soaking")
    return Soak(
        engine, load, probe, seconds, lag=lag, lengths=lengths, seed=seed, progress=progress
    ).run()


def limits_of(device: str, cold_format: str | None = None) -> Limits:
    """cold_format None: no token ages."""
    if cold_format is None:
        return CPU if device == "cpu" else GPU
    return TIERED_CPU if device == "cpu" else TIERED_GPU


def config_of(
    device: str,
    scratch: Path,
    progress: Progress = lambda _: None,
    cold_format: str | None = None,
) -> EngineConfig:
    """`scratch` is needed until the engine is built."""
    limits = limits_of(device, cold_format)
    if device == "cpu" and cold_format is None:
        folder, load_format = _built_in_model(scratch, limits.max_model_len, progress)
    else:
        shape = SMOLLM2_SHALLOW if device == "cpu" else LLAMA_8B
        folder, load_format = shape.write(scratch, limits.max_model_len), "dummy"
    return EngineConfig(
        folder,
        device=device,
        load_format=load_format,
        max_model_len=limits.max_model_len,
        cache=CacheConfig(
            kv_cache_bytes=limits.num_blocks * BLOCK_SIZE * limits.kv_token_bytes,
            tiers=None if cold_format is None else TierConfig(cold_format=cold_format),
        ),
        scheduler=limits.scheduler,
        check_integrity=True,
    )


def _built_in_model(scratch: Path, max_model_len: int, progress: Progress) -> tuple[Path, str]:
    """The folder, and how its weights are loaded."""
    try:
        return prepare_model(BUILT_IN_MODEL, progress=progress).path, "auto"
    except ModelFilesError as exc:
        progress(f"{exc}: random weights of its shape instead")
        return SMOLLM2_135M.write(scratch, max_model_len), "dummy"


def write(
    file: Path, device: str, sha: str, command: str, rows: list[Row], outcome: Outcome
) -> None:
    more = {
        "seconds": round(outcome.seconds, 1),
        "ended": dict(outcome.ledger.ended),
        "faults": outcome.ledger.shown,
        "step_ms": _by_kind(outcome.times),
        "step_cpu_ms": _by_kind(outcome.cpu_times),
    }
    if device != "cpu":
        write_gpu_results(file, sha, command, rows, more)
        return
    python = ".".join(map(str, sys.version_info[:3]))
    content = {
        "sha": sha,
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "cpu": cpu_name(),
        "versions": {"python": python, "torch": version("torch")},
        "command": command,
        **more,
        "rows": [row.as_json() for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _by_kind(times: StepTimes) -> dict[str, dict[str, float]]:
    return {
        each.kind: {"steps": each.num_steps, "median": each.median_ms, "worst": each.worst_ms}
        for each in times.kinds
    }


def _progress() -> Progress:
    started_s = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - started_s:6.1f} s] {message}", file=sys.stderr, flush=True)

    return progress
