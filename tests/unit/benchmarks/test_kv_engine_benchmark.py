"""The benchmark of the tiered engine, without a GPU: its frame, rows, bars and gate."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine import side_by_side
from benchmarks.engine.cases import described
from benchmarks.engine.job import Job, Outcome
from benchmarks.engine.job_process import cases_of
from benchmarks.engine.side_by_side import SideBySide
from benchmarks.errors import GateRed
from benchmarks.interference.case import ITL_P99, LONG_TTFT, SHORT_TTFT_P95
from benchmarks.interference.command import ITL_BUDGET_MS
from benchmarks.kv_engine import command
from benchmarks.kv_engine import gate as gates
from benchmarks.kv_engine.bars import CASES, NAMES
from benchmarks.kv_engine.cases import MadeUpDecodeCase
from benchmarks.results import Row

PROMISED = {
    *("step_b32_8k", "step_b8_32k_vs_exact", "tpot_b1_128k", "tpot_b1_1m"),
    *("ttft_32k_vs_exact", "ttft_128k_vs_exact"),
    *("tokens_fit_int4_vs_exact", "tokens_fit_k8v4_vs_exact", "tokens_fit_int8_vs_exact"),
}


def test_the_promised_cases_are_there() -> None:
    assert set(NAMES) == PROMISED
    told = Job("flashray", "m", tuple(described(case) for case in CASES), 1)
    assert tuple(cases_of(Job.from_json(told.to_json()))) == CASES
    (made_up,) = (case for case in CASES if isinstance(case, MadeUpDecodeCase))
    assert made_up.context == 1_000_000 < command.TIERED_LIMITS["max_model_len"]
    assert made_up is CASES[-1], "nothing is measured after it"


FITS = {"exact": 1300, "int4": 4600, "k8v4": 3000, "int8": 2400}
MS = {"flashray": 10.0, "vllm": 15.0}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> SideBySide:
    """A run whose jobs come back at once: 5 ms of ours with tiers, 10 without, 15 of vLLM's."""

    def outcome(job: Job, processes: object, progress: object) -> Outcome:
        value = 5.0 if job.cold_format else MS[job.engine]
        config = json.loads(Path(job.model, "config.json").read_text())
        assert config["max_position_embeddings"] >= job.max_model_len
        names = [each["name"] for each in job.cases]
        if "interference" in names:
            names = [ITL_P99, SHORT_TTFT_P95, LONG_TTFT]
        return Outcome(f"{job.engine} 1", value, {}, {name: [value] * 3 for name in names})

    def fill(run: SideBySide) -> None:
        facts = {
            name: {"num_tokens": num_tokens, "kv_bytes": 1 << 30, "host_bytes": 0}
            for name, num_tokens in FITS.items()
        }
        run.outcomes[command.CAPACITY] = Outcome("flashray", 1.0, facts)

    monkeypatch.setattr(side_by_side, "run_job", outcome)
    monkeypatch.setattr(side_by_side.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(side_by_side, "require_idle_gpu", lambda: None)
    monkeypatch.setattr(command, "measure_capacity", fill)
    arguments = argparse.Namespace(
        only=None,
        interference=False,
        parity=None,
        peer="vllm",
        repeats=3,
        seconds=None,
        peer_seconds=None,
        total_seconds=None,
    )
    return SideBySide(arguments, lambda message: None)


def rows_after(run: SideBySide) -> list[Row]:
    """Of all steps."""
    for _ in command.steps(run):
        rows = list(command.rows_of(run))
    return rows


def test_rows_of_a_whole_run(run: SideBySide) -> None:
    rows = rows_after(run)

    held = {row.case: row.meets_floor for row in rows if row.floor is not None}
    assert held.keys() == PROMISED
    assert {case for case, is_met in held.items() if not is_met} == {"tokens_fit_k8v4_vs_exact"}
    ratios = {row.case: row.ratio for row in rows if row.floor_of == "ratio"}
    assert ratios["step_b8_32k_vs_exact"] == pytest.approx(2.0)
    assert ratios["tokens_fit_int4_vs_exact"] == pytest.approx(46 / 13)
    beside = {(row.case, row.peer) for row in rows if row.peer and row.peer.startswith("vllm")}
    assert beside == {
        ("step_b32_8k", "vllm 1"),
        ("step_b32_8k", "vllm 1, fp8"),
        ("tpot_b1_128k", "vllm 1"),
        ("tpot_b1_128k", "vllm 1, fp8"),
        ("step_b8_32k", "vllm 1"),
    }
    (made_up,) = (row for row in rows if row.case == "tpot_b1_1m")
    assert "tokens of keys and values made up" in made_up.metric
    assert [row.ours for row in rows if row.metric == "of these bytes, on the host"] == [0, 0, 0]
    more = run.more()
    assert json.loads(json.dumps(more)) == more
    assert [(job.cold_format, job.kv_cache_dtype) for job in run.jobs] == [
        ("int4", "auto"),
        (None, "auto"),
        (None, "auto"),
        (None, "fp8"),
    ]
    assert {job.kv_cache_bytes for job in run.jobs} == {48 << 30}


def test_the_bar_of_a_first_token_is_a_share_more_than_exact(run: SideBySide) -> None:
    run.arguments.only = ["ttft_32k_vs_exact"]
    list(command.steps(run))
    tiered, exact = run.outcomes.values()
    for value, is_met in ((11.4, True), (11.6, False)):
        tiered.samples["ttft_32k"] = [value]
        (row,) = command.rows_of(run)
        assert row.meets_floor is is_met
    exact.samples.clear()
    (row,) = command.rows_of(run)
    assert (row.ratio, row.meets_floor) == (None, None)


def test_only_the_named_cases_run(run: SideBySide) -> None:
    run.arguments.only = ["tpot_b1_1m", "tokens_fit_int4_vs_exact"]
    rows = rows_after(run)
    assert [row.case for row in rows] == [*["tokens_fit_int4_vs_exact"] * 2, "tpot_b1_1m"]
    assert [[each["name"] for each in job.cases] for job in run.jobs] == [["tpot_b1_1m"]]


def test_a_second_peer_is_started_only_while_there_is_time(run: SideBySide) -> None:
    run.arguments.total_seconds = 480.0
    run.started_s -= 480 - command.FP8_PEER_S + 1
    run.arguments.only = ["step_b32_8k"]
    rows = rows_after(run)
    assert [row.peer for row in rows] == ["vllm 1"]


@pytest.mark.parametrize("peer", ["vllm", "none"])
def test_interference_with_tiers_has_its_bars(run: SideBySide, peer: str) -> None:
    run.arguments.only, run.arguments.interference = ["tpot_b1_1m"], True
    run.arguments.peer = peer
    rows = {row.case: row for row in rows_after(run)}
    assert rows.keys() - {"tpot_b1_1m"} == {
        f"tiered_{name}" for name in (ITL_P99, SHORT_TTFT_P95, LONG_TTFT)
    }
    assert rows[f"tiered_{ITL_P99}"].floor == 50.0 > ITL_BUDGET_MS
    row = rows[f"tiered_{LONG_TTFT}"]
    assert row.peer == ("vllm 1" if peer == "vllm" else "flashray, exact")
    assert row.floor_of == "ratio"
    assert row.meets_floor
    tiered, other = run.jobs[1:]
    assert (tiered.cold_format, tiered.itl_budget_ms) == ("int4", ITL_BUDGET_MS)
    exact_ms = None if peer == "vllm" else ITL_BUDGET_MS
    assert (other.cold_format, other.itl_budget_ms) == (None, exact_ms)


def test_a_capacity_that_fails_is_said(run: SideBySide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(command, "require_idle_gpu", lambda: None)
    monkeypatch.setattr(run.processes, "run", lambda *arguments: 1)
    command.measure_capacity(run)
    assert run.failed == {"flashray, capacity": "ended with 1"}

    def write(module: str, arguments: list[str], seconds: float) -> int:
        Outcome("flashray", 2.0, {"exact": 1}).write(Path(arguments[0]))
        return 0

    monkeypatch.setattr(run.processes, "run", write)
    command.measure_capacity(run)
    assert run.outcomes["flashray, capacity"].facts == {"exact": 1}


def test_without_its_tests_nothing_is_green(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, engines = (tmp_path / folder for folder in (gates.KERNEL_TESTS, gates.ENGINE_TESTS))
    for folder in (kernels, engines):
        folder.mkdir(parents=True)
    for name in ("test_kv_quantise.py", "test_tiered_decode.py", "test_linear.py"):
        (kernels / name).touch()
    (engines / "test_tokens.py").touch()
    with pytest.raises(GateRed, match=r"expected tests named test_tier\*\.py in .*engine_gpu"):
        gates.require_green_tiers(tmp_path)

    (engines / "test_tiers.py").touch()
    asked: list[str] = []
    monkeypatch.setattr(gates, "require_green", lambda *files: asked.extend(files))
    said = "2 passed in 1 s"
    monkeypatch.setattr(gates, "require_passing", lambda _, told, *__: asked.extend(told) or said)
    gates.require_green_tiers(tmp_path)
    assert {"test_kv_quantise.py", "test_tiered_decode.py"} <= set(asked)
    assert {"tests/engine_gpu/test_tiers.py", "tests/engine_gpu/test_tokens.py"} <= set(asked)
    assert "test_linear.py" not in asked

    said = "2 skipped in 1 s"
    with pytest.raises(GateRed, match=r"test_tiers\.py, .*pytest said:\n2 skipped"):
        gates.require_green_tiers(tmp_path)


def test_the_gate_stands_before_the_file(run: SideBySide, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    monkeypatch.setattr(command, "require_green_tiers", lambda: happened.append("tiers"))
    monkeypatch.setattr(command, "require_parity", lambda *_: happened.append("parity"))
    command.gate(run)
    assert happened == ["tiers"]
    run.arguments.parity, run.arguments.sha = Path("parity.json"), "abc"
    command.gate(run)
    assert happened == ["tiers", "tiers", "parity"]


@pytest.mark.parametrize("is_green", [True, False])
def test_nothing_is_measured_behind_a_red_gate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_green: bool,
) -> None:
    def require_green() -> None:
        if not is_green:
            raise GateRed("a test failed")

    def measure(run: SideBySide) -> Iterator[None]:
        seconds.append(run.seconds_for("flashray"))
        run.outcomes[command.CAPACITY] = Outcome("flashray", 1.0, {})
        run.outcomes["flashray int4, llama-3.1-8b"] = Outcome(
            "flashray", 1.0, {}, {"step_b32_8k": [7.0]}
        )
        yield

    seconds: list[float] = []
    written: list[tuple[object, ...]] = []
    file = tmp_path / "kv-engine-h200.json"
    monkeypatch.setattr(sys, "argv", ["kv_engine", "--sha", "abc", "--out", str(file)])
    monkeypatch.setattr(side_by_side.GpuProcesses, "stop_on_signals", lambda self: None)
    monkeypatch.setattr(side_by_side, "require_idle_gpu", lambda: None)
    monkeypatch.setattr(side_by_side, "write_gpu_results", lambda *told: written.append(told))
    monkeypatch.setattr(command, "require_green_tiers", require_green)
    monkeypatch.setattr(command, "steps", measure)

    status = command.main()

    assert status == (0 if is_green else 1)
    if not is_green:
        assert not seconds
        assert not written
        assert "GateRed: a test failed" in capsys.readouterr().err
        return
    assert seconds == [command.OUR_S]
    ((where, sha, said, (row,), _),) = written
    assert (where, sha, row.case, row.meets_floor) == (file, "abc", "step_b32_8k", True)
    assert said == "python -m benchmarks.kv_engine --sha abc --out kv-engine-h200.json"
