"""The example runs from its command line to its file, and its numbers mean what they say."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import cache_dropout as example
from tests.fakes.checkpoint import byte_tokenizer

SMALL = {"--device": "cpu", "--context": 512, "--hot": 64, "--warm": 64, "--sha": "abc"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of bytes whose heads have 32 channels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,  # wide: attention chooses
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(
    folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *formats: str, **options: float
) -> dict:
    given = SMALL | {"--model": folder, "--out": out}
    given |= {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    words = [str(word) for option in given.items() for word in option]
    monkeypatch.setattr("sys.argv", ["cache_dropout", *words, "--format", *formats])
    assert example.main() == 0
    return json.loads(out.read_text())


def test_fine_tuning_makes_dropping_the_cold_tier_cost_less(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    options = {"steps": 30, "learning_rate": 5e-3, "probability": 1, "windows": 3}
    written = run(folder, tmp_path / "found.json", monkeypatch, "drop", **options)

    assert written["sha"] == "abc"
    rows = {(row["case"], row["metric"]): row for row in written["rows"]}
    assert len(rows) == 2 * len(example.METRICS)
    for text in ("prose", "code"):
        row = rows[f"drop, {text}", "kl"]
        assert row["ours"] < 0.9 * row["peer_value"]
        low, high = row["interval"]
        assert low <= row["ours"] - row["peer_value"] <= high < 0
        assert row["num_tokens"] == 3 * (512 - 256 - 1)
    assert "KL(start || tiered)" in capsys.readouterr().out


def test_without_a_step_nothing_differs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"steps": 0, "windows": 1}
    rows = run(folder, tmp_path / "found.json", monkeypatch, "int4", "drop", **options)["rows"]
    for row in rows:
        assert row["ours"] == row["peer_value"]
        assert row["interval"] == [0, 0]
    kl = {row["case"]: row["ours"] for row in rows if row["metric"] == "kl"}
    assert 0 < kl["int4, prose"] < kl["drop, prose"]


def test_the_interval_holds_the_mean_of_correlated_tokens() -> None:
    random = np.random.default_rng(0)
    of_segments = np.repeat(random.normal(1.0, 1.0, 100), example.SEGMENT)
    low, high = example.interval_of(of_segments, seed=0)
    assert low < of_segments.mean() < high
    assert high - low == pytest.approx(2 * 1.96 / 10, rel=0.25)
