"""`flashray trace --attention` on a tiny model, whose tokens are bytes: files, words, refusals."""

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from deployments.cli import main
from deployments.model_files import prepare_model
from tests.fakes.checkpoint import byte_llama, tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Tiny-Llama"
    return byte_llama(folder, head_dim=64, max_position_embeddings=1024)


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def text_of(num_bytes: int) -> str:
    text = Path("text.txt")
    text.write_bytes(bytes(97 + index * index % 23 for index in range(num_bytes)))
    return str(text)


def traced(folder: str = "tiny-llama.trace") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "trace.json").read_text())
    return found


def test_files_and_words_say_what_was_seen(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--attention", "--tiers", "int4", "--max-tokens", "6", "--layer", "1"]

    assert main(["trace", str(model), text_of(830), *options]) == 0

    found, said = traced(), capsys.readouterr()
    files = prepare_model(str(model))
    assert found["model"] == "tiny-llama"
    assert found["tiers"] == "int4"
    assert found["weights_sha256"] == files.manifest.sha256
    assert found["text_sha256"] == hashlib.sha256(Path("text.txt").read_bytes()).hexdigest()
    assert found["num_prompt_tokens"] == 831
    assert len(found["token_ids"]) == 6
    assert found["layer_groups"] == [[0, 1]]
    assert [step["position"] for step in found["steps"]] == list(range(830, 836))
    for step in found["steps"]:
        masses = np.array(step["mass"])
        assert masses.shape == (2, 2, 14 if step["position"] >= 832 else 13)
        assert np.abs(masses.sum(2) - 1).max() < 1e-4
        assert (np.array(step["mass_of_last_256"]) <= 1).all()
        assert (np.array(step["mass_of_first_4"]) <= masses[..., 0] + 2e-6).all()
    runs = [(run["tier"], run["start"], run["end"]) for run in found["steps"][-1]["runs"][0]]
    assert runs == [("sink", 0, 64), ("cold", 64, 192), ("warm", 192, 704), ("hot", 704, 836)]
    assert found["steps"][1]["demoted"][0][0] == {
        "part": "keys",
        "source_format": "bf16",
        "target_format": "int8",
        "num_blocks": 8,
    }
    for name in ("layers.png", "layer-1.png"):
        assert cv2.imread(str(Path("tiny-llama.trace", name))) is not None
        assert f"{name:<14}tiny-llama.trace/{name}" in said.out
    assert "tiny-llama, int4: 831 tokens of text.txt and 6 more" in said.out
    assert "tracing 9/9 steps" in said.err  # four chunks of the prompt, five decodes


def test_what_is_left_out_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--attention", "--skip-epsilon", "0.5", "--max-tokens", "6"]
    assert main(["trace", str(model), text_of(830), *options]) == 0
    found = traced()
    assert found["skip_epsilon"] == 0.5
    assert "certificate" not in found["steps"][0]
    shares = np.array([step["certificate"] for step in found["steps"][1:]])
    left_out = np.array([step["left_out"] for step in found["steps"][1:]])
    assert shares.shape[:2] == left_out.shape[:2] == (5, 2)
    assert 0 < shares.max() <= 0.5
    said = f"left out by decodes: {left_out.mean():.1f} blocks' values a KV head"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tiers", "none"], "--skip-epsilon needs tiers, --tiers is none: leave out either"),
        ([], "--skip-epsilon: skip_epsilon must be above 0 and below 1"),
    ],
)
def test_an_epsilon_that_cannot_be_is_refused(
    model: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--attention", "--skip-epsilon", "1.5", *options]
    assert main(["trace", str(model), text_of(20), *chosen]) != 0
    assert said in capsys.readouterr().err


def test_the_table_is_that_of_the_data(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(model), text_of(830), "--attention", "--max-tokens", "5"]) == 0
    found, said = traced(), capsys.readouterr().out.splitlines()
    rows = {line[:18].strip(): line[18:].split() for line in said if "%" in line}
    assert list(rows) == ["sink", "cold", "warm", "hot", "the first 4", "the last 256"]
    assert rows["cold"][0] == "128"
    num_bytes = 2 * 2 * 2 * (64 * 64 + 64 * 32 + 4 * (64 + 64))  # layers, blocks, heads
    assert rows["cold"][1] == f"{num_bytes:,}"
    shares = [float(rows[tier][2].rstrip("%")) for tier in ("sink", "cold", "warm", "hot")]
    assert sum(shares) == pytest.approx(100, abs=0.21)
    steps = [np.array(step["mass"])[..., 0] for step in found["steps"][1:]]
    assert shares[0] == pytest.approx(100 * np.mean(steps), abs=0.06)
    by_layer = np.mean(
        [np.array(step["mass_of_last_256"]).mean(1) for step in found["steps"][1:]], 0
    )
    assert rows["the last 256"][2:] == [
        f"{by_layer.min():.1%}", "in", str(by_layer.argmin()),
        f"{by_layer.max():.1%}", "in", str(by_layer.argmax()),
    ]  # fmt: skip
    assert any(line.startswith("demoted in each layer by decodes, blocks: ") for line in said)


def test_a_prompt_may_come_by_standard_input_and_a_cache_be_exact(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello there")))
    options = ["--attention", "--tiers", "none", "--max-tokens", "2", "--out", "found"]
    assert main(["trace", str(model), *options, "-"]) == 0
    found, said = traced("found"), capsys.readouterr().out
    assert found["num_prompt_tokens"] == 12
    assert [run["tier"] for run in found["steps"][1]["runs"][0]] == ["exact"]
    assert found["steps"][1]["demoted"] == [[]]
    assert "tiny-llama, exact: 12 tokens of - and 2 more" in said
    assert "demoted" not in said
    drawn = [file.name for file in Path("found").glob("layer-*.png")]
    assert drawn in (["layer-0.png"], ["layer-1.png"])


def test_the_same_text_gives_the_same_files(model: Path) -> None:
    for name in ("one", "two"):
        main(["trace", str(model), text_of(700), "--attention", "--max-tokens", "3", "--out", name])
    for file in Path("one").iterdir():
        assert file.read_bytes() == Path("two", file.name).read_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-tokens", "1"], "--max-tokens must be at least 2, for one to be decoded, got 1"),
        (["--layer", "2"], "--layer must be in [0, 2), got 2"),
        (["--layer", "-1"], "--layer must be in [0, 2), got -1"),
        (["--out", "no/where"], "--out no/where: expected a folder, or a place for one: No such"),
        (["--out", "text.txt"], "--out text.txt: expected a folder, or a place for one: File"),
        (["--device", "cuda"], "--device cuda: torch sees none here; leave it out"),
        (
            ["--max-tokens", "124"],
            "text.txt has 901 tokens of tiny-llama, which with 124 of --max-tokens are more than "
            "its context of 1,024; take a shorter text",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(
    options: list[str],
    said: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["trace", str(model), text_of(900), "--attention", *options]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "tracing" not in error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "text.txt is empty; say something"),
        (b"abc\xff", "text.txt: expected UTF-8 text, at byte 3"),
        (None, "text.txt: expected a text file, No such file"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(
    content: bytes | None, said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("text.txt").write_bytes(content)
    assert main(["trace", str(model), "text.txt", "--attention"]) == 1
    assert said in capsys.readouterr().err


def test_a_model_that_bears_no_tiers_is_traced_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_checkpoint(tmp_path / "checkpoint")
    command = ["trace", str(tmp_path / "checkpoint"), text_of(60), "--attention"]
    assert main(command) == 1
    assert "this model's is 8; leave kv_tiers out: --tiers none" in capsys.readouterr().err
    assert main([*command, "--tiers", "none", "--max-tokens", "3"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["text.txt", "--attention", "--tiers", "int3"], "invalid choice: 'int3'"),
        (["text.txt"], "the following arguments are required: --attention"),
        (["--attention"], "the following arguments are required: text"),
    ],
)
def test_commands_that_make_no_sense_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["trace", "no-model", *arguments])
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "no-model", text_of(100), "--attention"]) == 1
    assert "model 'no-model': expected" in capsys.readouterr().err
