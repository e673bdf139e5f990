"""One engine's part of a run, in a process of its own: what it is told, and what it tells back.

The next engine starts when this one's process has gone, and with it all of its GPU memory.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from benchmarks.command import Progress
from benchmarks.errors import MeasurementFailed
from benchmarks.results import ROOT

MAX_MODEL_LEN = 131072 + 1024
KILL_AFTER_S = 20  # of the deadline: a job ends by itself before a sample that starts too late
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class Job:
    """`cases` are described as their `described()` does. `seconds` from the process's start: no
    sample starts later. `model` holds a config.json alone: its weights are made up."""

    engine: Literal["flashray", "vllm"]
    model: str
    cases: tuple[Mapping[str, Any], ...]
    seconds: float
    repeats: int = 3
    device: str = "cuda:0"
    dtype: str = "bfloat16"
    kv_cache_bytes: int = 48 << 30
    max_model_len: int = MAX_MODEL_LEN
    max_num_sequences: int = 64
    max_num_batched_tokens: int = 16384
    itl_budget_ms: float | None = None  # ours only
    spawned_at_s: float = 0.0  # time.time()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        fields = json.loads(text)
        return cls(**fields | {"cases": tuple(fields["cases"])})


@dataclass(slots=True)
class Outcome:
    """`samples` by case; `failed` says why a case has none or fewer. `ready_s`: from the process's
    start to the first token."""

    engine: str
    ready_s: float
    facts: dict[str, object] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Whole or not at all: the reader may come at any time."""
        scratch = file.with_suffix(".part")
        scratch.write_text(json.dumps(asdict(self)))
        scratch.replace(file)

    @classmethod
    def read(cls, file: Path) -> Self:
        return cls(**json.loads(file.read_text()))


def run_job(job: Job, progress: Progress, module: str = "benchmarks.engine.job_process") -> Outcome:
    """What the job wrote by its deadline, even if it broke off. Raises MeasurementFailed when that
    is nothing. Its output goes to our stderr."""
    environment = dict(os.environ)
    if job.engine == "vllm":
        environment |= VLLM_ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="flashray-job-") as folder:
        told, answer = Path(folder, "job.json"), Path(folder, "outcome.json")
        fields = asdict(job) | {"spawned_at_s": time.time()}
        told.write_text(Job(**fields).to_json())
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(told), str(answer)],
            cwd=ROOT,
            env=environment,
            stdout=sys.stderr,
            start_new_session=True,  # an engine has processes of its own: they end with it
        )
        try:
            status = process.wait(job.seconds + KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_session(process)
        ended = "was stopped at its deadline" if status is None else f"ended with {status}"
        if not answer.exists():
            raise MeasurementFailed(f"the job of {job.engine} {ended}, without a first token")
        if status != 0:
            progress(f"the job of {job.engine} {ended}; what it measured until then counts")
        return Outcome.read(answer)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
