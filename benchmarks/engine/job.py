"""One engine's part of a run, in a process of its own: what it is told, and what it tells back.

The next engine starts when this one's process has gone, and with it all of its GPU memory.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from benchmarks.command import Progress
from benchmarks.engine.gpu_process import GpuProcesses
from benchmarks.errors import MeasurementFailed

MAX_MODEL_LEN = 131072 + 1024
KILL_AFTER_S = 20  # of the deadline: a job ends by itself before a sample that starts too late
MAX_ERROR_CHARS = 2000
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
    cold_format: str | None = None  # ours only, as tokens age; None: none does
    kv_cache_dtype: str = "auto"  # the peer's only
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


def run_job(job: Job, processes: GpuProcesses, progress: Progress) -> Outcome:
    """What the job wrote, even if it broke off. Raises MeasurementFailed when that is nothing, with
    the end of its traceback."""
    environment = VLLM_ENVIRONMENT if job.engine == "vllm" else {}
    with tempfile.TemporaryDirectory(prefix="flashray-job-") as folder:
        told, answer = Path(folder, "job.json"), Path(folder, "outcome.json")
        told.write_text(replace(job, spawned_at_s=time.time()).to_json())
        status = processes.run(
            "benchmarks.engine.job_process",
            [str(told), str(answer)],
            job.seconds + KILL_AFTER_S,
            environment,
        )
        ended = "was ended" if status is None else f"ended with {status}"
        error = error_file(answer)
        if error.exists():
            ended += f": {error.read_text()[-MAX_ERROR_CHARS:]}"
        if not answer.exists():
            raise MeasurementFailed(f"the job of {job.engine} {ended}, without a first token")
        outcome = Outcome.read(answer)
    if status != 0:
        outcome.failed["process"] = ended
        progress(f"the job of {job.engine} {ended}; what it measured until then counts")
    return outcome


def error_file(answer: Path) -> Path:
    """Where a job that breaks leaves its traceback."""
    return answer.with_suffix(".error")
