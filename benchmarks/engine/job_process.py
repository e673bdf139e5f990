"""`python -m benchmarks.engine.job_process JOB.json OUTCOME.json`: the process of one job."""

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine.cases import Bench, Case, DecodeCase, FirstTokenCase, PrefillCase
from benchmarks.engine.gpu_process import end_with_parent
from benchmarks.engine.job import Job, Outcome, error_file
from benchmarks.engine.stepped import SteppedEngine, generate
from benchmarks.errors import MeasurementFailed
from benchmarks.interference.case import InterferenceCase
from benchmarks.kv_engine.cases import KeptFirstTokenCase, MadeUpDecodeCase

CASES = (
    *(DecodeCase, PrefillCase, FirstTokenCase, InterferenceCase),
    *(KeptFirstTokenCase, MadeUpDecodeCase),
)
KINDS: dict[str, type[Any]] = {case.kind: case for case in CASES}
WARM_UP_TOKENS = (256, 8192)


def main() -> None:
    end_with_parent()
    told, answer = (Path(argument) for argument in sys.argv[1:3])
    try:
        work(Job.from_json(told.read_text()), answer)
    except Exception:
        error_file(answer).write_text(traceback.format_exc())
        raise


def work(job: Job, answer: Path) -> None:
    marks = {"python": time.time() - job.spawned_at_s}
    build = builder(job)
    marks["imports"] = time.time() - job.spawned_at_s
    engine = build(job)
    marks["engine"] = time.time() - job.spawned_at_s
    bench = Bench(engine, job.repeats, job.spawned_at_s + job.seconds)
    generate(engine, [bench.fresh(16)], 1)
    outcome = Outcome(engine.name, time.time() - job.spawned_at_s, engine.facts)
    outcome.facts["seconds_until"] = {**marks, "first token": outcome.ready_s}
    say(job, f"{engine.name}: {outcome.facts}")
    outcome.write(answer)
    for num_tokens in WARM_UP_TOKENS:
        generate(engine, [bench.fresh(min(num_tokens, job.max_model_len // 2))], 16)
    for case in cases_of(job):
        say(job, measure(case, bench, outcome, lambda: outcome.write(answer)))


def builder(job: Job) -> Callable[[Job], SteppedEngine]:
    """What is imported belongs to the start."""
    if job.engine == "vllm":
        from benchmarks.engine.stepped_vllm import SteppedVllm

        return SteppedVllm
    from benchmarks.engine.stepped_flashray import SteppedFlashray

    logging.basicConfig(format="  [%(relativeCreated)6.0f ms] %(name)s: %(message)s")
    logging.getLogger("engine").setLevel(logging.INFO)  # how long which phase of the start took
    return SteppedFlashray


def cases_of(job: Job) -> Iterator[Case]:
    for described in job.cases:
        fields: Mapping[str, Any] = {key: described[key] for key in described if key != "kind"}
        yield KINDS[described["kind"]](**fields)


def measure(case: Case, bench: Bench, outcome: Outcome, keep: Callable[[], None]) -> str:
    """What came, for people. `keep` is called after every sample: the next may take too long."""
    came: dict[str, list[float]] = {}
    try:
        for samples in case.samples(bench):
            for name, value in samples.items():
                came.setdefault(name, []).append(value)
            outcome.samples.update(came)
            keep()
    except MeasurementFailed as exc:
        outcome.failed[case.name] = str(exc)
        keep()
    shown = [f"{name} {[round(value, 2) for value in values]}" for name, values in came.items()]
    return f"{', '.join(shown)} {outcome.failed.get(case.name, '')}"


def say(job: Job, message: str) -> None:
    print(f"  [{time.time() - job.spawned_at_s:5.1f} s] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
