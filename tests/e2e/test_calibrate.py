"""`flashray calibrate` as a user runs it, on real weights and real text."""

import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import pytest

from engine.build import weights_sha256
from engine.cache.calibration import Calibration

pytestmark = pytest.mark.model

NUM_CHARACTERS = 6_800  # of English about Python: 1,600 tokens, so one window
MIN_KEPT = 0.8  # of layers: measured 1.0


def calibrate(folder: Path, num_characters: int) -> subprocess.CompletedProcess[str]:
    prose = "\n\n".join(pydoc_data.topics.topics.values())
    (folder / "prose.txt").write_text(prose[:num_characters])
    command = ["calibrate", "smollm2-135m-instruct", "prose.txt", "--plot", "errors.svg"]
    return subprocess.run(
        [sys.executable, "-m", "deployments.cli", *command, "--tokens", "1536"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_built_in_model_keeps_the_default_format_in_most_layers(
    smollm2_path: Path, tmp_path: Path
) -> None:
    ended = calibrate(tmp_path, NUM_CHARACTERS)

    assert ended.returncode == 0, ended.stderr
    assert "measuring 30/30 layers" in ended.stderr
    found = Calibration.read(tmp_path / "smollm2-135m-instruct.calibration.json")
    found.refuse_other_model(weights_sha256(smollm2_path), 30)
    assert found.num_tokens == (1536,)
    means = {name: sum(errors) / 30 for name, errors in found.errors.items()}
    assert 0.0005 < means["int8"] < means["k8v4"] < means["int4"] < 0.05
    assert found.cold_formats.count("k8v4") >= MIN_KEPT * 30
    assert (tmp_path / "errors.svg").read_text().count("<polyline") == 3


def test_a_text_too_short_is_refused_with_its_number_of_tokens(
    smollm2_path: Path, tmp_path: Path
) -> None:
    ended = calibrate(tmp_path, 2_000)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("flashray: prose.txt has ")
    assert "a calibration needs at least 1,535" in ended.stderr
    assert list(tmp_path.glob("*.json")) == []
