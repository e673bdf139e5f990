import sys

import pytest

from benchmarks.command import run_benchmark, table
from benchmarks.errors import MeasurementFailed
from benchmarks.results import Row

ROWS = [
    Row("added", "latency", "ms", "lower", 9.0, "peer", 18.0, 8.0),
    Row("mock", "m", "ms", "lower", 1.0),
]


def run(measure) -> int:
    return run_benchmark("absent", ["tests/absent.py"], measure, ["ray"], "benchmarks.absent")


def test_a_table_shows_ratios_and_missed_bars():
    added, mock = table(ROWS).splitlines()[1:]
    assert added.split() == ["added", "9.00", "18.00", "ms", "2.00", "8", "(value)", "MISSED"]
    assert mock.split() == ["mock", "1.00", "-", "ms", "-"]


def test_no_write_measures_without_a_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["x", "--no-write"])
    assert run(lambda progress: (progress("measuring"), ROWS)[1]) == 0
    printed = capsys.readouterr()
    assert "added" in printed.out
    assert "measuring" in printed.err


def test_a_red_gate_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["x", "--allow-dirty"])
    assert run(lambda _progress: pytest.fail("measured")) == 1
    assert "GateRed" in capsys.readouterr().err


def test_a_failed_measurement_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def measure(_progress) -> list[Row]:
        raise MeasurementFailed("the peer did not start")

    monkeypatch.setattr(sys, "argv", ["x", "--no-write"])
    assert run(measure) == 1
    assert capsys.readouterr().err == "MeasurementFailed: the peer did not start\n"
