"""Engines in processes of their own: ours with tiny made-up weights on a CPU, the peer a fake."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine import job as jobs
from benchmarks.engine.cases import DecodeCase, FirstTokenCase, PrefillCase, described
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

    outcome = run_job(told, lambda message: None)

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
    outcome = run_job(job("vllm", TINY.write(tmp_path / "m", 512), *CASES), lambda message: None)

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

    outcome = run_job(told, lines.append)

    assert len(outcome.samples["first"]) == 2
    assert "hangs" not in outcome.samples
    assert "deadline" in lines[0]


@pytest.mark.usefixtures("peer_is_there")
def test_no_sample_starts_after_the_deadline(tmp_path: Path) -> None:
    told = job("vllm", TINY.write(tmp_path / "m", 512), FirstTokenCase("first", 64), seconds=0.01)
    outcome = run_job(told, lambda message: None)
    assert outcome.samples == {}
    assert outcome.failed == {"first": "out of time after 0 samples"}


def test_a_job_without_a_first_token_is_no_outcome(tmp_path: Path) -> None:
    """The peer is not installed here."""
    assert "vllm" not in sys.modules
    with pytest.raises(MeasurementFailed, match="ended with 1, without a first token"):
        run_job(job("vllm", TINY.write(tmp_path / "m", 512)), lambda message: None)


def test_an_outcome_is_written_whole(tmp_path: Path) -> None:
    outcome = Outcome("ours", 1.5, {"blocks": 3}, {"a": [1.0]}, {"b": "why"})
    outcome.write(tmp_path / "outcome.json")
    assert Outcome.read(tmp_path / "outcome.json") == outcome
    assert [file.name for file in tmp_path.iterdir()] == ["outcome.json"]
