"""How the GPU tests are dealt over processes, and judged; they themselves need a GPU."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernels.gpu import run

ROOT = Path(__file__).parents[2]
HEAD = "import pytest\npytestmark = pytest.mark.gpu\n"
GREEN = HEAD + "@pytest.mark.parametrize('n', range(9))\ndef test_green(n): pass\n"
RED = HEAD + "def test_red(): assert 6 * 9 == 42\n"
SKIPPED = HEAD + "def test_skipped(): pytest.skip('needs a CUDA device')\n"

Write = Callable[[dict[str, str]], list[str]]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Two shards of the files written."""
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "num_cores", lambda: 2)

    def write(sources: dict[str, str]) -> list[str]:
        for file, source in sources.items():
            (tmp_path / file).write_text(source)
        return list(sources)

    return write


def test_every_test_is_in_one_shard_and_neighbours_are_scattered(tmp_path: Path) -> None:
    (tmp_path / "test_green.py").write_text(GREEN)
    options = ["-q", "--collect-only", "-c", "/dev/null", "-p", "tests.kernels.gpu.shard"]
    environment = os.environ | run.ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    shards = []
    for shard in ("1/2", "2/2"):
        command = [sys.executable, "-m", "pytest", *options, "--shard", shard, "test_green.py"]
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        shards.append({int(line[-2]) for line in ran.stdout.splitlines() if line.endswith("]")})

    assert sorted(map(len, shards)) == [4, 5]
    assert shards[0] | shards[1] == set(range(9))
    for regular in (range(5), range(5, 9), range(0, 9, 2), range(1, 9, 2)):
        assert set(regular) not in shards


def test_what_ran_is_told_and_a_shard_of_none_is_no_failure(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    only = HEAD + "def test_one(): pass\n"
    assert run.run_all(written({"test_scope.py": GREEN, "test_a.py": only}))

    *shards, alone = capsys.readouterr().out.splitlines()[:3]
    assert {line[:9] for line in shards} == {"shard 1/2", "shard 2/2"}
    assert sum(" passed" in line for line in shards) == 1
    assert alone.startswith("test_scope.py")
    assert "9 passed" in alone


def test_cores_are_those_that_we_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5}, raising=False)
    assert run.num_cores() == 2
    monkeypatch.delattr("os.sched_getaffinity")
    assert run.num_cores() == 32


def test_what_failed_is_shown(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run.run_all(written({"test_a.py": GREEN, "test_b.py": RED}))
    assert "assert (6 * 9) == 42" in capsys.readouterr().out


def test_a_run_where_nothing_passed_fails(
    written: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run.run_all(written({"test_a.py": SKIPPED}))
    assert "no test passed" in capsys.readouterr().out


def test_a_file_that_is_not_there_fails(written: Write) -> None:
    assert not run.run_all([*written({"test_a.py": GREEN}), "test_gone.py"])
    assert not run.run_all(["test_scope.py"])


def test_the_slowest_are_named(written: Write, capsys: pytest.CaptureFixture[str]) -> None:
    slow = HEAD + "import time\ndef test_slow(): time.sleep(0.05)\n"
    assert run.run_all(written({"test_a.py": GREEN, "test_b.py": slow}))
    said = capsys.readouterr().out.splitlines()
    assert said[said.index("slowest:") + 1].endswith("::test_slow")
