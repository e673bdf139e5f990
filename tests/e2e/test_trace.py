"""`flashray trace --attention` as a user runs it, on real weights and real text."""

import json
import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

pytestmark = pytest.mark.model

NUM_CHARACTERS = 5_600  # of English about Python: 1,285 tokens
PROSE = "\n\n".join(pydoc_data.topics.topics.values())


def traced(folder: Path, num_characters: int) -> subprocess.CompletedProcess[str]:
    command = ["trace", "smollm2-135m-instruct", "-", "--attention", "--max-tokens", "4"]
    return subprocess.run(
        [sys.executable, "-m", "deployments.cli", *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        input=PROSE[:num_characters],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.usefixtures("smollm2_path")
def test_the_built_in_model_looks_at_its_sink_and_its_last_tokens(tmp_path: Path) -> None:
    ended = traced(tmp_path, NUM_CHARACTERS)

    assert ended.returncode == 0, ended.stderr
    assert "tracing 9/9 steps" in ended.stderr
    folder = tmp_path / "smollm2-135m-instruct.trace"
    found = json.loads((folder / "trace.json").read_text())
    assert found["num_prompt_tokens"] == 1285
    for step in found["steps"]:
        assert np.array(step["mass"]).shape == (30, 3, 21)
        assert np.abs(np.array(step["mass"]).sum(2) - 1).max() < 1e-4
    first, last = (
        np.mean([step[name] for step in found["steps"][1:]])
        for name in ("mass_of_first_4", "mass_of_last_256")
    )
    assert 0.2 < first < 0.4  # measured 0.30
    assert 0.35 < last < 0.6  # measured 0.43
    starts = [run["start"] for run in found["steps"][-1]["runs"][0]]
    assert starts == [0, 64, 640, 1152]
    drawn = cv2.imread(str(folder / "layers.png"))
    assert drawn is not None
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > 100  # colours


@pytest.mark.usefixtures("smollm2_path")
def test_a_text_too_long_is_refused_with_its_number_of_tokens(tmp_path: Path) -> None:
    ended = traced(tmp_path, 40_000)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("flashray: - has ")
    assert "more than its context of 8,192; take a shorter text" in ended.stderr
    assert list(tmp_path.iterdir()) == []
