"""Processor time by process, of a /proc that is made up and of this machine's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.http.processor_time import (
    TICKS_PER_S,
    descendants_s,
    microseconds_a_token,
)


def _process(proc: Path, pid: int, parent: int, ticks: tuple[int, int], command: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    fields = ["S", str(parent), *["0"] * 9, *map(str, ticks), "0"]
    (folder / "stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}\n")
    (folder / "cmdline").write_text(command.replace(" ", "\0") + "\0")


def test_descendants_are_found_however_deep_and_others_are_not(tmp_path: Path) -> None:
    _process(tmp_path, 1, 0, (9, 9), "init")
    _process(tmp_path, 20, 10, (TICKS_PER_S, TICKS_PER_S), "serve it")
    _process(tmp_path, 10, 1, (5, 5), "benchmark")
    _process(tmp_path, 30, 20, (0, TICKS_PER_S // 2), "ray::Router")
    _process(tmp_path, 40, 1, (7, 7), "stranger")
    (tmp_path / "50").mkdir()  # it ended while we looked
    (tmp_path / "meminfo").write_text("")

    assert descendants_s(10, tmp_path) == {(20, "serve it"): 2.0, (30, "ray::Router"): 0.5}


def test_those_of_one_name_are_summed_and_clients_left_out() -> None:
    before = {(1, "router"): 1.0, (2, "router"): 1.0, (3, "engine"): 2.0, (4, "gone"): 1.0}
    after = {(1, "router"): 1.5, (2, "router"): 2.0, (3, "engine"): 2.0, (5, "client"): 9.0}

    assert microseconds_a_token(before, after, 1000) == {"router": pytest.approx(1500.0)}


def test_a_child_that_works_is_seen_to() -> None:
    """Processor seconds of a real process, as the kernel counts them."""
    work = "import time\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        spent_s = {pid: seconds for (pid, _), seconds in descendants_s(os.getpid()).items()}
        child.kill()

    assert 0.15 <= spent_s[child.pid] <= 5.0
