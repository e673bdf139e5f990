"""Tests that have to pass before anything is measured: red, hanging, or about nothing."""

from pathlib import Path

import pytest

from benchmarks.errors import GateRed
from benchmarks.gate import MAX_PRINTED, require_passing
from benchmarks.kernels import gate as kernels_gate


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "green.py").write_text("import sys\nprint('2 passed', *sys.argv[1:])\n")
    (tmp_path / "red.py").write_text(
        f"import sys\nprint('x' * {MAX_PRINTED})\nsys.exit('the cache lies')\n"
    )
    (tmp_path / "stuck.py").write_text("import time\nprint('shard 1/2 passed')\ntime.sleep(60)\n")
    return tmp_path


def test_what_it_printed_is_given(root: Path) -> None:
    assert require_passing("green", ["a.py", "b.py"], root, 30) == "2 passed a.py b.py\n"


def test_a_red_one_is_said_with_its_last_words(root: Path) -> None:
    with pytest.raises(GateRed, match=r"`python -m red a\.py` ended with 1:\nx+") as red:
        require_passing("red", ["a.py"], root, 30)
    assert str(red.value).endswith("the cache lies\n")
    assert len(str(red.value)) < MAX_PRINTED + 200


def test_one_that_does_not_end_is_red_and_what_it_did_is_said(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_gate, "GATE", "stuck")
    monkeypatch.setattr(kernels_gate, "ROOT", root)
    monkeypatch.setattr(kernels_gate, "TIMEOUT_S", 2)
    with pytest.raises(
        GateRed,
        match=r"`python -m stuck test_linear\.py` took longer than 2 s .*\nshard 1/2 passed",
    ):
        kernels_gate.require_green("test_linear.py")
