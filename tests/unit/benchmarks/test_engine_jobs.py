"""Engines in processes of their own: ours with tiny made-up weights on a CPU, the peer a fake."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.engine import gpu_process
from benchmarks.engine import job as jobs
from benchmarks.engine.cases import DecodeCase, FirstTokenCase, PrefillCase, described
from benchmarks.engine.gpu_process import GpuProcesses, require_idle_gpu
from benchmarks.engine.job import Job, Outcome, run_job
from benchmarks.engine.shapes import Shape
from benchmarks.errors import MeasurementFailed
from benchmarks.interference.case import (
    ITL_P99,
    LONG_TTFT,
    QUIET_ITL_P50,
    SHORT_TTFT_P95,
    InterferenceCase,
)
from benchmarks.results import ROOT

BREAKING = 78  # tokens of a prompt that breaks the fake
PEER_SITE = Path(__file__).parents[2] / "fakes" / "peer_site"
TINY = Shape("tiny", 32, 64, 2, 4, 2, 8, 256, 1e4, False)
CASES = (
    PrefillCase("prefill", 100, group=2, num_groups=3),
    DecodeCase("decode", 4, 100, num_steps=20),
    FirstTokenCase("first", 64),
    InterferenceCase(
        num_streams=2,
        stream_context=30,
        long_context=300,
        short_context=20,
        short_every_s=0.01,
        quiet_s=0.1,
        num_stream_tokens=450,
        max_s=10,
    ),
)


def job(engine: str, model: Path, *cases: object, **fields: object) -> Job:
    told = tuple(described(case) for case in cases)
    return replace(
        Job(engine, str(model), told, 60, 2, max_model_len=512, kv_cache_bytes=8 << 20), **fields
    )


def run(told: Job) -> Outcome:
    return run_job(told, GpuProcesses(), lambda message: None)


@pytest.fixture
def peer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PEER_SITE))


def test_a_job_survives_its_file() -> None:
    told = job("vllm", Path("model"), *CASES)
    assert Job.from_json(told.to_json()) == told


def test_ours_measures_every_case(tmp_path: Path) -> None:
    model = TINY.write(tmp_path / "m", 512)
    ours = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 256}
    told = job("flashray", model, *CASES, **ours)

    outcome = run(told)

    assert outcome.failed == {}
    assert outcome.engine == "flashray"
    assert 0.5 < outcome.ready_s < 60
    assert len(outcome.samples["prefill"]) == 3
    assert len(outcome.samples["decode"]) == len(outcome.samples["first"]) == 2
    names = ("decode", "first", ITL_P99, SHORT_TTFT_P95, LONG_TTFT, QUIET_ITL_P50)
    assert all(0 < value < 5e3 for name in names for value in outcome.samples[name])
    assert outcome.samples[ITL_P99] >= outcome.samples[QUIET_ITL_P50]
    assert outcome.facts["cached_tokens"] > 512


@pytest.mark.usefixtures("peer_is_there")
def test_the_peer_measures_the_same_cases(tmp_path: Path) -> None:
    outcome = run(job("vllm", TINY.write(tmp_path / "m", 512), *CASES))

    assert outcome.failed == {}
    assert outcome.engine == "vllm 0.0.fake"
    assert outcome.facts["cached_tokens"] == (8 << 20) // TINY.kv_token_bytes
    assert len(outcome.samples["prefill"]) == 3
    assert all(2 <= value < 10 for value in outcome.samples["decode"])


@pytest.mark.usefixtures("peer_is_there")
def test_a_job_that_hangs_is_ended_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "KILL_AFTER_S", 0.0)
    lines: list[str] = []
    told = job(
        "vllm",
        TINY.write(tmp_path / "m", 512),
        FirstTokenCase("first", 64),
        FirstTokenCase("hangs", 77),
        seconds=6.0,
    )

    outcome = run_job(told, GpuProcesses(), lines.append)

    assert len(outcome.samples["first"]) == 2
    assert "hangs" not in outcome.samples
    assert outcome.failed == {"process": "was ended"}
    assert "was ended; what it measured until then counts" in lines[0]


@pytest.mark.usefixtures("peer_is_there")
def test_no_sample_starts_after_the_deadline(tmp_path: Path) -> None:
    told = job("vllm", TINY.write(tmp_path / "m", 512), FirstTokenCase("first", 64), seconds=0.01)
    outcome = run(told)
    assert outcome.samples == {}
    assert outcome.failed == {"first": "out of time after 0 samples"}


def test_a_job_without_a_first_token_is_no_outcome(tmp_path: Path) -> None:
    """The peer is not installed here."""
    assert "vllm" not in sys.modules
    with pytest.raises(
        MeasurementFailed, match=r"(?s)ended with 1: .*No module named 'vllm'.*token"
    ):
        run(job("vllm", TINY.write(tmp_path / "m", 512)))


def test_an_outcome_is_written_whole(tmp_path: Path) -> None:
    outcome = Outcome("ours", 1.5, {"blocks": 3}, {"a": [1.0]}, {"b": "why"})
    outcome.write(tmp_path / "outcome.json")
    assert Outcome.read(tmp_path / "outcome.json") == outcome
    assert [file.name for file in tmp_path.iterdir()] == ["outcome.json"]


@pytest.mark.usefixtures("peer_is_there")
def test_what_breaks_a_job_is_told_with_what_it_measured(tmp_path: Path) -> None:
    told = job(
        "vllm",
        TINY.write(tmp_path / "m", 512),
        FirstTokenCase("first", 64),
        FirstTokenCase("breaks", BREAKING),
        FirstTokenCase("never", 64),
    )
    outcome = run(told)
    assert list(outcome.samples) == ["first"]
    assert "the engine broke" in outcome.failed["process"]


@pytest.mark.usefixtures("peer_is_there")
def test_a_broken_engine_is_not_stepped_again(tmp_path: Path) -> None:
    case = InterferenceCase(num_streams=1, stream_context=BREAKING, num_stream_tokens=100)
    outcome = run(job("vllm", TINY.write(tmp_path / "m", 512), case))
    assert "the engine broke" in outcome.failed["process"]


SLEEPER = """
import subprocess, sys, time
from benchmarks.engine.gpu_process import end_with_parent
end_with_parent()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("started", flush=True)
time.sleep(60)
"""
PARENT = """
import sys
from benchmarks.engine.gpu_process import GpuProcesses
processes = GpuProcesses()
processes.stop_on_signals()
print(processes.run("sleeper", [], 60), processes.is_stopped, file=sys.stdout)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_one_that_started_it(tmp_path: Path, number: int) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stderr is not None
    assert parent.stderr.readline() == "started\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) == 2

    parent.send_signal(number)
    said, _ = parent.communicate(timeout=20)

    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert said == ("None True\n" if number == signal.SIGTERM else "")


def test_a_gpu_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([70_000, 70_000, 500])
    monkeypatch.setattr(gpu_process, "_used_mib", lambda: next(used))
    monkeypatch.setattr(gpu_process.time, "sleep", lambda seconds: None)
    require_idle_gpu()
    monkeypatch.setattr(gpu_process, "_used_mib", lambda: 3000)
    with pytest.raises(MeasurementFailed, match="3000 MiB of its memory are taken"):
        require_idle_gpu(within_s=-1)


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MeasurementFailed, match="expected a GPU that nvidia-smi knows"):
        require_idle_gpu()
