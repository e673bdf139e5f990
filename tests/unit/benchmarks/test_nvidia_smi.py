"""Which GPU is asked, and what comes of the answer; by a program that answers in its place."""

import os
from pathlib import Path

import pytest

from benchmarks.engine import gpu_process
from benchmarks.errors import MeasurementFailed
from benchmarks.nvidia_smi import query_gpu

ANSWERS = """#!/bin/sh
echo "$@" > "$0.asked"
case "$*" in
  *memory.used*) echo "71234 MiB" ;;
  *) echo "580.1, 1980 MHz" ;;
esac
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text(ANSWERS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path), os.environ["PATH"])))
    return tmp_path / "nvidia-smi.asked"


@pytest.mark.parametrize(
    ("visible", "asked_for"),
    [(None, "0"), ("1", "1"), ("3,1", "3"), (" 2 , 0", "2"), ("GPU-6f0a-11", "GPU-6f0a-11")],
)
def test_the_gpu_that_cuda_sees_first_is_asked(
    asked: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, asked_for: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert query_gpu("driver_version", "clocks.sm") == ["580.1", "1980 MHz"]
    options = asked.read_text().split()
    assert options[0] == "--query-gpu=driver_version,clocks.sm"
    assert options[-1] == f"--id={asked_for}"


@pytest.mark.usefixtures("asked")
def test_the_memory_that_is_taken_is_read_without_its_unit() -> None:
    with pytest.raises(MeasurementFailed, match="71234 MiB of its memory are taken"):
        gpu_process.require_idle_gpu(within_s=-1)
