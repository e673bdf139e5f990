"""`python -m benchmarks.engine.job_process JOB.json OUTCOME.json`: the process of one job."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine.cases import Bench, Case, DecodeCase, FirstTokenCase, PrefillCase
from benchmarks.engine.job import Job, Outcome
from benchmarks.engine.stepped import SteppedEngine, generate
from benchmarks.errors import MeasurementFailed
from benchmarks.interference.case import InterferenceCase

KINDS: dict[str, type[Any]] = {
    case.kind: case for case in (DecodeCase, PrefillCase, FirstTokenCase, InterferenceCase)
}
WARM_UP_TOKENS = (256, 8192)


def main() -> None:
    told, answer = (Path(argument) for argument in sys.argv[1:3])
    job = Job.from_json(told.read_text())
    engine = start(job)
    bench = Bench(engine, job.repeats, job.spawned_at_s + job.seconds)
    generate(engine, [bench.fresh(16)], 1)
    outcome = Outcome(engine.name, time.time() - job.spawned_at_s, engine.facts)
    say(job, f"{engine.name}: first token after {outcome.ready_s:.1f} s, {engine.facts}")
    outcome.write(answer)
    for num_tokens in WARM_UP_TOKENS:
        generate(engine, [bench.fresh(min(num_tokens, job.max_model_len // 2))], 16)
    for case in cases_of(job):
        say(job, measure(case, bench, outcome, lambda: outcome.write(answer)))


def start(job: Job) -> SteppedEngine:
    if job.engine == "vllm":
        from benchmarks.engine.stepped_vllm import SteppedVllm

        return SteppedVllm(job)
    from benchmarks.engine.stepped_flashray import SteppedFlashray

    return SteppedFlashray(job)


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
