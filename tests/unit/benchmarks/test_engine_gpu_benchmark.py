"""The GPU benchmarks of the engine, without a GPU: timing rules, rows, bars and the frame."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_results
from benchmarks.engine import attention, gpu, side_by_side
from benchmarks.engine.bars import BARS, MEASURES, START, roofline_row
from benchmarks.engine.job import Job, Outcome
from benchmarks.engine.shapes import LLAMA_8B, SMOLLM2_135M
from benchmarks.engine.side_by_side import SideBySide
from benchmarks.engine.stepped import Generation, Progressed, generate
from benchmarks.errors import MeasurementFailed
from benchmarks.interference import command as interference
from benchmarks.interference.case import ITL_P99, LONG_TTFT, SHORT_TTFT_P95
from benchmarks.results import Row

PROMISED = {
    *("tpot_b1_1k", "tpot_b1_8k", "tpot_b1_32k", "tpot_b1_128k", "step_b8_8k", "step_b32_8k"),
    *("prefill_tok_s", "ttft_8k", "ttft_32k", "smollm2_tpot_1k", "attn_b32_8k", "attn_b1_128k"),
    "start_ready_s",
}


class Generous:
    """Gives every request `extra` tokens more than it asked for, one a step."""

    name = "generous"
    vocab_size = 100

    def __init__(self, extra: int) -> None:
        self.facts: dict[str, object] = {}
        self._extra = extra
        self._left: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add(self, request_id: str, prompt: list[int], num_new_tokens: int) -> None:
        self._left[request_id] = num_new_tokens + self._extra

    def step(self) -> list[Progressed]:
        progressed = [Progressed(request_id, 1, 8) for request_id in self._left]
        self._left = {name: left - 1 for name, left in self._left.items() if left > 1}
        return progressed

    def abort(self, request_ids: Sequence[str]) -> None:
        raise AssertionError(f"nothing aborts here, but {request_ids} were to be")


def test_the_promised_cases_are_there() -> None:
    assert set(gpu.CASES) == PROMISED
    assert BARS.keys() <= PROMISED


def test_a_generation_counts_tokens_and_first_tokens() -> None:
    run = generate(Generous(0), [[1], [2], [3]], 4)
    assert [count for _, count in run.steps] == [3, 3, 3, 3]
    assert run.first_tokens_s == (run.steps[0][0],) * 3
    assert run.num_cached == 24


def test_other_work_than_asked_for_is_no_measurement() -> None:
    with pytest.raises(MeasurementFailed, match=r"\[5, 5\] tokens, asked for 4"):
        generate(Generous(1), [[1], [2]], 4)


def test_only_steps_of_the_whole_batch_count() -> None:
    steps = ((1.0, 1), (2.0, 2), (2.010, 2), (2.040, 2), (2.060, 2), (9.0, 1))
    assert Generation((), steps, 0).median_gap_ms(2) == pytest.approx(20)
    with pytest.raises(MeasurementFailed, match="expected steps of 3 tokens"):
        Generation((), steps, 0).median_gap_ms(3)
    with pytest.raises(MeasurementFailed, match="expected steps of 1 tokens"):
        Generation((), ((1.0, 1),), 0).median_gap_ms(1)


def test_bytes_of_the_shapes() -> None:
    """Against the counts that vLLM's figures on this shape were held to."""
    assert LLAMA_8B.read_weight_bytes == pytest.approx(15.0e9, rel=2e-3)
    assert LLAMA_8B.kv_token_bytes == 131072
    assert SMOLLM2_135M.read_weight_bytes == pytest.approx(2 * 134.5e6, rel=1e-3)
    (measure,) = (each for each in MEASURES if each.case.name == "step_b32_8k")
    (row,) = roofline_row(measure, Row("c", "t", "ms", "lower", 12.8, "p", 13.2), 4.38e6)
    assert row.ours == pytest.approx(11.33 / 12.8, rel=1e-2)
    assert row.peer_value == pytest.approx(11.33 / 13.2, rel=1e-2)
    (prefill,) = (each for each in MEASURES if each.case.name == "prefill_tok_s")
    assert list(roofline_row(prefill, row, 4.38e6)) == []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> SideBySide:
    """A run whose jobs come back at once: 4 ms and 40 tok/s of ours, 5 and 50 of vLLM's."""

    def outcome(job: Job, processes: object, progress: object) -> Outcome:
        value = 4.0 if job.engine == "flashray" else 5.0
        samples = {
            each["name"]: [value * (10 if each["kind"] == "prefill" else 1)] * 3
            for each in job.cases
        }
        assert json.loads(Path(job.model, "config.json").read_text())["num_hidden_layers"] > 0
        return Outcome(job.engine, 10 * value, {"limit": job.max_model_len}, samples)

    monkeypatch.setattr(side_by_side, "run_job", outcome)
    monkeypatch.setattr(side_by_side.importlib.util, "find_spec", lambda name: name)
    kernels = {
        "copy_bytes_per_us": 4.25e6,
        "attn_b32_8k": {"ours_us": 253.0, "peer_us": 258.0, "peer_failed": None},
    }
    monkeypatch.setattr(gpu, "measure_attention", lambda run: run.kernels.update(kernels))
    monkeypatch.setattr(side_by_side, "require_idle_gpu", lambda: None)
    arguments = argparse.Namespace(
        only=gpu.CASES, peer="vllm", repeats=3, seconds=None, peer_seconds=None, total_seconds=None
    )
    return SideBySide(arguments, lambda message: None)


def rows_after(run: SideBySide) -> list[Row]:
    """Of all steps."""
    for _ in gpu.steps(run):
        rows = list(gpu.rows_of(run))
    return rows


def test_rows_of_a_whole_run(run: SideBySide) -> None:
    rows = rows_after(run)

    ratios = {row.case: row.ratio for row in rows if row.floor_of == "ratio"}
    assert ratios["tpot_b1_1k"] == ratios[START] == pytest.approx(1.25)
    assert ratios["prefill_tok_s"] == pytest.approx(0.8)
    assert ratios["attn_b32_8k"] == pytest.approx(258 / 253)
    held = {row.case: row.meets_floor for row in rows if row.floor is not None and row.peer is None}
    assert held == {"tpot_b1_1k": True, "step_b32_8k": True, "smollm2_tpot_1k": False, START: False}
    assert {row.case for row in rows} == PROMISED - {"attn_b1_128k"} | {"device copy"}
    more = run.more()
    assert json.loads(json.dumps(more)) == more
    assert len(run.jobs) == 5
    assert more["failed"] == {}


def test_what_failed_has_no_row_and_does_not_stop_the_rest(
    run: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job, processes: object, progress: object) -> Outcome:
        if job.engine == "vllm":
            raise MeasurementFailed("no first token")
        samples = {each["name"]: [4.0] for each in job.cases if each["name"] != "ttft_8k"}
        return Outcome("flashray", 9.0, {}, samples, {"ttft_8k": "out of time"})

    monkeypatch.setattr(side_by_side, "run_job", fail)
    rows = rows_after(run)

    assert "ttft_8k" not in {row.case for row in rows}
    tpot = next(row for row in rows if row.case == "tpot_b1_1k")
    assert (tpot.peer_value, tpot.ratio, tpot.meets_floor) == (None, None, None)
    assert run.more()["failed"] == {
        "vllm, llama-3.1-8b": "no first token",
        "vllm, smollm2-135m": "no first token",
        "flashray, llama-3.1-8b": {"ttft_8k": "out of time"},
        "flashray, llama-3.1-8b, again": {"ttft_8k": "out of time"},
        "flashray, smollm2-135m": {"ttft_8k": "out of time"},
    }


def test_only_the_named_cases_run(run: SideBySide) -> None:
    run.arguments.only = gpu._names("smollm2_tpot_1k")
    run.arguments.peer = "none"
    rows = rows_after(run)
    assert len(run.jobs) == 1
    assert run.jobs[0].max_model_len == 8192
    (row,) = (row for row in rows if row.floor_of == "ratio" and row.unit == "ms")
    assert (row.case, row.peer) == ("smollm2_tpot_1k", None)
    with pytest.raises(argparse.ArgumentTypeError, match="unknown: tpot;"):
        gpu._names("smollm2_tpot_1k,tpot")


def test_interference_rows_and_their_bars() -> None:
    ours = Outcome("flashray", 9, {}, {ITL_P99: [60, 40, 41], SHORT_TTFT_P95: [600.0]})
    ours.samples[LONG_TTFT] = [15_000.0]
    peer = Outcome("vllm 1", 9, {}, {ITL_P99: [275.0], LONG_TTFT: [10_700.0]})

    rows = {row.case: row for row in interference.outcome_rows(ours, peer)}

    assert (rows[ITL_P99].ours, rows[ITL_P99].meets_floor) == (41, True)
    assert rows[SHORT_TTFT_P95].meets_floor is False
    assert rows[SHORT_TTFT_P95].ratio is None
    assert rows[LONG_TTFT].meets_floor is True
    ours.samples[LONG_TTFT] = [16_500.0]
    assert {row.case: row.meets_floor for row in interference.outcome_rows(ours, peer)}[
        LONG_TTFT
    ] is False


def test_interference_gives_the_engines_their_limits(run: SideBySide) -> None:
    list(interference.steps(run))
    ours, peer = run.jobs
    assert ours.itl_budget_ms == interference.ITL_BUDGET_MS
    assert peer.max_num_batched_tokens == 2048
    assert ours.kv_cache_bytes == peer.kv_cache_bytes


def test_a_file_needs_its_commit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", "file.json"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "--out needs --sha" in capsys.readouterr().err


def test_the_file_names_the_gpu_and_its_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ["580.1", "1980 MHz", "3201 MHz", "1980 MHz", "3201 MHz"]
    monkeypatch.setattr(gpu_results, "query_gpu", lambda *fields: values)
    monkeypatch.setattr(gpu_results.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    file = tmp_path / "new" / "file.json"

    gpu_results.write_gpu_results(
        file, "abc", "python", [Row("c", "m", "ms", "lower", 2.0, "p", 3.0)], {"samples": [1]}
    )

    content = json.loads(file.read_text())
    assert (content["sha"], content["gpu"], content["samples"]) == ("abc", "NVIDIA H200", [1])
    assert content["clocks"]["clocks.mem"] == "3201 MHz"
    assert content["versions"]["driver"] == "580.1"
    assert content["rows"][0]["ratio"] == 1.5


def test_flash_attention_gets_what_vllm_gives_it() -> None:
    query = torch.zeros(3, 4, 8)
    caches = [torch.zeros(6, attention.BLOCK_SIZE, 2, 8) for _ in "kv"]
    tables, lengths = torch.arange(6).view(3, 2), torch.full((3,), 100)

    options = attention.options_of((query, *caches, tables, lengths, 0.5))

    assert options["out"].shape == query.shape
    assert options["cu_seqlens_q"].tolist() == [0, 1, 2, 3]
    assert options["max_seqlen_k"] == 2 * attention.BLOCK_SIZE
    integers = [options[name] for name in ("cu_seqlens_q", "seqused_k", "block_table")]
    assert all(each.dtype == torch.int32 for each in integers)


def test_what_there_is_has_rows_before_the_rest(run: SideBySide) -> None:
    steps = gpu.steps(run)
    next(steps)
    assert {row.case for row in gpu.rows_of(run)} == {"attn_b32_8k", "device copy"}
    next(steps)
    first = {row.case: row for row in gpu.rows_of(run) if row.floor_of == "ratio"}
    assert (first["ttft_8k"].ours, first["ttft_8k"].peer_value) == (4.0, None)
    next(steps)
    then = {row.case: row for row in gpu.rows_of(run) if row.floor_of == "ratio"}
    assert (then["ttft_8k"].ours, then["ttft_8k"].peer_value) == (4.0, 5.0)


def test_a_stop_ends_the_run_with_what_it_has(run: SideBySide) -> None:
    steps = gpu.steps(run)
    next(steps)
    next(steps)
    run.processes.is_stopped = True
    list(steps)
    assert len(run.jobs) == 1
    assert "ttft_8k" in {row.case for row in gpu.rows_of(run)}
    assert set(run.failed.values()) == {"out of time"}


def test_the_total_bounds_every_process(run: SideBySide) -> None:
    run.arguments.total_seconds = 100.0
    assert 79 < run.seconds_for("vllm") <= 80
    run.started_s -= 70
    with pytest.raises(MeasurementFailed, match="out of time"):
        run.seconds_for("flashray")
