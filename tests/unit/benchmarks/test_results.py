"""The writer refuses what nobody could trust: red tests, uncommitted code, code that changed."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.errors import DirtyTree, GateRed
from benchmarks.results import Recording, Row

GREEN, RED = "test_gate.py::test_green", "test_gate.py::test_red"
ROW = Row("speed", "throughput", "tok/s", "higher", 20.0, "peer 1.0", 10.0, 0.95, "ratio")


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    ran = subprocess.run(
        ["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True
    )
    return ran.stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A committed tree with one product file and a gate."""
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "app.py").write_text("x = 1\n")
    (tmp_path / "test_gate.py").write_text(
        "def test_green(): pass\ndef test_red(): assert False, 'the cache lies'\n"
    )
    (tmp_path / ".gitignore").write_text("__pycache__/\n.pytest_cache/\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "Start")
    return tmp_path


def written(file: Path) -> dict:
    return json.loads(file.read_text())


def test_a_result_names_its_commit_machine_and_command(root: Path):
    recording = Recording.open("speed", [GREEN], root=root)

    file = recording.write([ROW], {"torch": "2.13"}, "python -m benchmarks.speed")

    content = written(file)
    assert file == root / "benchmarks" / "results" / "speed.json"
    assert list(content) == ["sha", "date", "cpu", "versions", "command", "rows"]
    assert content["sha"] == git(root, "rev-parse", "HEAD")
    assert "cores" in content["cpu"]
    assert content["versions"] == {"torch": "2.13"}
    assert content["rows"] == [
        {
            "case": "speed",
            "metric": "throughput",
            "unit": "tok/s",
            "better": "higher",
            "ours": 20.0,
            "peer": "peer 1.0",
            "peer_value": 10.0,
            "ratio": 2.0,
            "floor": 0.95,
            "floor_of": "ratio",
        }
    ]


def test_a_gpu_stands_in_the_place_of_the_cpu(root: Path):
    file = Recording.open("speed", [GREEN], root=root).write([ROW], {}, "x", gpu="H200")
    assert written(file)["gpu"] == "H200"
    assert "cpu" not in written(file)


def test_a_red_gate_is_refused_with_its_reason(root: Path):
    with pytest.raises(GateRed, match="the cache lies"):
        Recording.open("speed", [GREEN, RED], root=root)


def test_a_gate_that_tests_nothing_is_red(root: Path):
    with pytest.raises(GateRed):
        Recording.open("speed", ["test_gate.py::test_of_nothing"], root=root)


def test_a_gate_that_does_not_end_is_red(root: Path):
    with pytest.raises(GateRed, match=r"longer than 0\.05 s"):
        Recording.open("speed", [GREEN], root=root, gate_timeout_s=0.05)


@pytest.mark.parametrize("file", ["router/app.py", "router/new.py", "kernels/op.py"])
def test_uncommitted_product_code_is_refused(root: Path, file: str):
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text("x = 2\n")
    with pytest.raises(DirtyTree, match=file):
        Recording.open("speed", [GREEN], root=root)


def test_allow_dirty_says_so_in_the_sha(root: Path):
    (root / "router" / "app.py").write_text("x = 2\n")
    recording = Recording.open("speed", [GREEN], allow_dirty=True, root=root)
    head = git(root, "rev-parse", "HEAD")
    assert written(recording.write([ROW], {}, "x"))["sha"] == f"{head}+dirty"


def test_allow_dirty_on_a_clean_tree_says_nothing(root: Path):
    recording = Recording.open("speed", [GREEN], allow_dirty=True, root=root)
    assert written(recording.write([ROW], {}, "x"))["sha"] == git(root, "rev-parse", "HEAD")


def test_other_files_may_be_uncommitted(root: Path):
    (root / "notes.md").write_text("not measured")
    results = root / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "other.json").write_text("{}")
    assert Recording.open("speed", [GREEN], root=root).write([ROW], {}, "x").exists()


@pytest.mark.parametrize("is_committed", [False, True])
def test_code_that_changes_while_it_is_measured_is_refused(root: Path, is_committed: bool):
    recording = Recording.open("speed", [GREEN], root=root)
    (root / "router" / "app.py").write_text("x = 2\n")
    if is_committed:
        git(root, "commit", "-qam", "Change")
    with pytest.raises(DirtyTree, match="measure again"):
        recording.write([ROW], {}, "x")
    assert not (root / "benchmarks" / "results").exists()


def test_no_git_tree_is_refused(tmp_path: Path):
    with pytest.raises(DirtyTree, match="git"):
        Recording.open("speed", [], root=tmp_path)


def test_numbers_that_are_none_are_not_written(root: Path):
    row = Row("speed", "throughput", "tok/s", "higher", float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        Recording.open("speed", [GREEN], root=root).write([row], {}, "x")


@pytest.mark.parametrize(
    ("better", "ours", "peer_value", "ratio"),
    [
        ("higher", 30, 20, 1.5),
        ("lower", 20, 30, 1.5),
        ("lower", 40, 20, 0.5),
        ("higher", 1, 0, None),
    ],
)
def test_a_ratio_above_one_is_better(better, ours, peer_value, ratio):
    assert Row("c", "m", "u", better, ours, "peer", peer_value).ratio == ratio


@pytest.mark.parametrize(
    ("row", "meets"),
    [
        (Row("c", "m", "ms", "lower", 7.9, floor=8), True),
        (Row("c", "m", "ms", "lower", 8.1, floor=8), False),
        (Row("c", "m", "1/s", "higher", 170, floor=170), True),
        (Row("c", "m", "1/s", "higher", 130, floor=170), False),
        (Row("c", "m", "1/s", "higher", 19, "p", 20, 0.95, "ratio"), True),
        (Row("c", "m", "1/s", "higher", 18, "p", 20, 0.95, "ratio"), False),
        (Row("c", "m", "1/s", "higher", 18, floor=0.95, floor_of="ratio"), None),
        (Row("c", "m", "1/s", "higher", 18), None),
    ],
)
def test_a_bar_is_held_against_the_value_or_the_ratio(row: Row, meets: bool | None):
    assert row.meets_floor is meets
