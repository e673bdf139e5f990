"""The benchmark of quality: scores, intervals, bars, and a whole run of a tiny model on a CPU."""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from benchmarks.errors import GateRed, MeasurementFailed
from benchmarks.quality import command, report
from benchmarks.quality.bars import BARS, FOUR_BIT_PEERS, PASSKEY_EQUAL, rows_of
from benchmarks.quality.command import Run
from benchmarks.quality.forced import SCORED_FROM, Comparison, Exact
from benchmarks.quality.intervals import Interval, means_along
from benchmarks.quality.recall import (
    ANSWER_TOKENS,
    CHAT,
    DEPTHS,
    INTRODUCTION,
    LIST,
    PASSKEY,
    answers,
    tasks,
)
from benchmarks.quality.session import open_session
from benchmarks.quality.settings import BY_NAME, FLOOR, IN_FLOAT32, Setting
from benchmarks.quality.texts import Text, Tokenizer, real_texts
from benchmarks.results import Row
from engine.models.model_config import ModelConfig
from tests.unit.engine.tiny_checkpoint import SIZES, save_tiny

VOCAB_SIZE = 199
NUM_TOKENS = 1088
LETTERS = Tokenizer(
    lambda text: [ord(letter) % VOCAB_SIZE for letter in text],
    lambda token_ids: "".join(map(chr, token_ids)),
)
OURS = ("int4", "k8v4", "int8")
PROMISED = {
    *("kl_int4_prose", "kl_int4_code", "kl_k8v4", "kl_int8", "top1_int4", "top1_k8v4"),
    "passkey_equal",
}


def test_scores_are_those_of_whole_distributions() -> None:
    """However many steps are looked at together."""
    num_scored, num_windows, num_settings = 37, 2, 3
    shape = (num_scored, num_settings, num_windows, VOCAB_SIZE)
    generator = torch.Generator().manual_seed(1)
    came = torch.randn(shape, generator=generator)
    exact = came[:, 0] + 0.1 * torch.randn(came[:, 0].shape, generator=generator)
    targets = torch.randint(0, VOCAB_SIZE, (num_scored, num_windows), generator=generator)
    comparison = Comparison(Exact((), exact, targets), num_settings)
    for step in range(num_scored):
        comparison.take(SCORED_FROM - 1 + step, came[step].flatten(0, 1))
    for setting, scores in enumerate(comparison.scores()):
        wide, ours = exact.double().log_softmax(-1), came[:, setting].double().log_softmax(-1)
        expected_kl = torch.nn.functional.kl_div(ours, wide, reduction="none", log_target=True)
        torch.testing.assert_close(scores[0], expected_kl.sum(-1).T)
        assert torch.equal(scores[1] > 0, (wide.argmax(-1) == ours.argmax(-1)).T)
        nlls = [-each.gather(-1, targets[..., None])[..., 0] for each in (ours, wide)]
        torch.testing.assert_close(scores[2], (nlls[0] - nlls[1]).T)


def test_an_interval_covers_means_of_runs() -> None:
    rng = np.random.default_rng(3)
    covering = 0
    for _ in range(100):
        levels = rng.normal(1.0, 0.5, (2, 20)).repeat(64, axis=1)  # neighbours are alike
        found = Interval.of(levels + rng.normal(0, 0.1, levels.shape))
        assert found.low < found.mean < found.high
        covering += found.low <= 1.0 <= found.high
    assert 85 <= covering <= 100
    same = np.full((2, 100), 0.25)
    assert Interval.of(same).as_json() == [0.25, 0.25, 0.25]
    assert Interval.of(levels) == Interval.of(levels)
    assert means_along(np.arange(12.0).reshape(2, 6), 4) == [4.5, 7.5]


def test_windows_follow_each_other_from_a_text_s_start() -> None:
    text = Text.cut("letters", "abcdefghij", LETTERS.encode, 2, 3)
    assert [LETTERS.decode(list(window)) for window in text.windows] == ["abc", "def"]
    assert Text.cut("one", "abcdef", LETTERS.encode, 1, 4).windows == (tuple(b"abcd"),)
    with pytest.raises(MeasurementFailed, match="has 10 tokens, 3 windows of 4 need 12"):
        Text.cut("letters", "abcdefghij", LETTERS.encode, 3, 4)


def test_every_python_has_the_texts() -> None:
    texts = real_texts(LETTERS, 2, 8192)
    assert [text.name for text in texts] == ["prose", "code"]
    assert all(len(window) == 8192 for text in texts for window in text.windows)


@pytest.mark.parametrize("num_tokens", [1088, 8192])
def test_what_is_to_be_recalled_is_in_the_prompt(num_tokens: int) -> None:
    found = tasks(LETTERS, num_tokens)
    assert [task.kind for task in found].count(PASSKEY) == len(DEPTHS)
    assert {task.kind for task in found} == {PASSKEY, LIST, CHAT}
    assert len({task.name for task in found}) == len(found)
    for task in found:
        assert num_tokens - 60 < len(task.prompt) + ANSWER_TOKENS <= num_tokens
        assert task.answer in LETTERS.decode(task.prompt)
        assert 0 < task.num_answer_tokens <= ANSWER_TOKENS
    told = [LETTERS.decode(task.prompt) for task in found if task.kind == PASSKEY]
    at = [each.index("The pass key is") for each in told]
    steps = {after - before for before, after in itertools.pairwise(at)}
    assert max(steps) - min(steps) <= 1
    assert told[0][: at[0]].endswith(f"{INTRODUCTION}\n\n\n\n")
    assert 0 < told[-1].index("What is the pass key?") - at[-1] < 80


def test_answers_are_held_against_those_of_the_exact_cache() -> None:
    (task, *_) = tasks(LETTERS, 1088)
    right, wrong = LETTERS.encode(task.answer + "?!"), LETTERS.encode("00000..")
    (found,) = answers([task], [right], [right[:-1] + wrong[-1:]], LETTERS).values()
    assert (found.is_right, found.equals_exact, found.is_same) == (True, True, True)
    (found,) = answers([task], [wrong], [LETTERS.encode("11111..")], LETTERS).values()
    assert (found.is_right, found.equals_exact, found.is_same) == (False, True, False)
    assert found.text == "00000"
    for said, exact in ((right, wrong), (wrong, right)):
        (found,) = answers([task], [said], [exact], LETTERS).values()
        assert (found.equals_exact, found.is_same) == (False, False)


RECALL = {
    f"{kind}_{share}": {"right": 0.5, "equal": 1.0, "same": 0.75}[share]
    for kind in (PASSKEY, LIST, CHAT)
    for share in ("right", "equal", "same")
}


def made_up(**kls: float) -> dict[str, Any]:
    """Figures of all settings: KL 0.004 but where it is said."""

    def of_text(kl: float) -> dict[str, Any]:
        return {
            "kl": [kl, kl / 2, kl * 2],
            "top1": [1 - 10 * kl, 0.9, 1.0],
            "delta_nll": [kl, -kl, kl],
            "kl_by_window": [kl, kl],
            "kl_by_position": [kl / 2, kl, kl * 2],
        }

    return {
        name: {
            "kind": setting.kind,
            "title": setting.title,
            "bytes": setting.num_bytes(64),
            "prose": of_text(kls.get(name, 0.004)),
            "code": of_text(1.5 * kls.get(name, 0.004)),
        }
        | ({"recall": RECALL} if setting.kind in ("engine", "noise") else {})
        for name, setting in BY_NAME.items()
    }


def test_the_promised_bars_are_there_and_take_the_worse_text() -> None:
    found = made_up(int4=0.001, k8v4=0.0003, int8=2e-5)
    found["engine_int4"]["recall"] = RECALL | {f"{PASSKEY}_equal": 0.8}
    rows = {row.case: row for row in rows_of(found)}
    assert {bar.case for bar in BARS} | {PASSKEY_EQUAL} == PROMISED
    beside = {f"kl_int4_{text}_vs_{peer}" for text in ("prose", "code") for peer in FOUR_BIT_PEERS}
    engines = {f"kl_engine_{each}_{text}" for each in OURS for text in ("prose", "code")}
    assert rows.keys() == PROMISED | beside | engines
    assert {case for case, row in rows.items() if row.meets_floor is False} == {
        *("kl_k8v4", PASSKEY_EQUAL)
    }
    lines = [command.told(row) for row in rows.values()]
    assert len([line for line in lines if line.endswith("MISSED")]) == 2
    assert len([line for line in lines if line.endswith(" met")]) == 5 + len(beside)
    assert rows["kl_k8v4"].ours == pytest.approx(0.00045)
    assert rows["top1_k8v4"].ours == pytest.approx(1 - 0.0045)
    assert rows["kl_int4_code_vs_vllm_int4"].ratio == pytest.approx(4)
    assert rows["kl_engine_int4_code"].peer_value == pytest.approx(0.006)
    del found["kivi4"], found["int8"]
    assert len(list(rows_of(found))) == len(rows) - 3


def test_a_page_gets_its_table_and_pictures_from_the_file(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "model": "a model",
        "texts": {"prose": {"num_scored": 14336}, "code": {"num_scored": 14336}},
        "scored_from": SCORED_FROM,
        "exact_recall": RECALL,
        "settings": made_up(int4=0.00085, int8=0.0),
    }
    for of_text in ("prose", "code"):
        more["settings"]["engine_int4"][of_text]["kl_above_floor"] = [-2e-5, -1e-4, 4e-5]
    file, page = tmp_path / "found.json", tmp_path / "quality.md"
    file.write_text(json.dumps({"sha": "abcdef12345", "gpu": "a GPU", "more": more}))
    page.write_text(f"before\n{report.BEGIN}\nstale\n{report.END}\nafter\n")
    for _ in range(2):
        report.main(file, page)
        written = page.read_text()
        assert written.startswith("before\n")
        assert written.endswith("after\n")
        assert "stale" not in written
    assert "a model, a GPU, commit abcdef1: 14,336 tokens of prose and 14,336 tokens" in written
    kls = ".00085 (.00042 to .00170) | .00127 (.00064 to .00255)"
    assert f"| **int4** | 72 | {kls} | 98.7% |" in written
    kls = ".00400 (.00200 to .00800) | .00600 (.00300 to .012)"
    above = "-.000020 (-.00010 to .000040)"
    found = "94.0% | 100%, 100%, 100% | 75%, 75%, 75% |"
    assert f"| int4, in the engine | {kls} | {above}; {above} | {found}" in written
    assert f"| no tiers, deterministic | {kls} |  | {found}" in written
    assert "Right answers of the exact cache: 50%, 50%, 50%." in written
    assert " 0.0" not in written
    for name in (report.BY_BYTES, report.ALONG):
        picture = ElementTree.fromstring((tmp_path / name).read_text())
        shown = [each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert {"int4", "k8v4", "int8"} <= set(shown)
        assert float(picture.attrib["width"]) == 960
    page.write_text("no place")
    with pytest.raises(MeasurementFailed, match="expected <!-- figures: begin -->"):
        report.main(file, page)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What a run on a GPU did, in order; nothing of it is really done."""
    done: list[str] = []

    def measure(run: Run, settings: list[Setting]) -> Iterator[None]:
        run.found |= made_up()
        done.append(" ".join(each.name for each in settings))
        yield

    monkeypatch.setattr(command, "require_green_tiers", lambda: done.append("gate"))
    monkeypatch.setattr(Tokenizer, "of", lambda _: LETTERS)
    monkeypatch.setattr(command, "weights_sha256", lambda _: "ab" * 32)
    monkeypatch.setattr(Run, "measure", measure)

    def write(file: Path, sha: str, told: str, rows: list[Row], more: dict[str, Any]) -> None:
        done.append(f"{file.name} {sha} {len(rows)} rows, {list(more)}: {told}")

    monkeypatch.setattr(command, "write_gpu_results", write)
    arguments = ["quality", "--model", str(tmp_path), "--sha", "abc", "--out", "a/kv-quality.json"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--settings", "int4", "kivi4"])
    return done


def test_the_file_is_written_behind_the_gate(
    called: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main() == 0
    assert called[:2] == ["gate", "int4 kivi4"]
    assert called[2].startswith(
        "kv-quality.json abc 19 rows, ['more']: python -m benchmarks.quality"
    )
    assert str(tmp_path) not in called[2]
    assert len(capsys.readouterr().out.splitlines()) == 19


def test_nothing_is_measured_behind_a_red_gate(
    called: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def red() -> None:
        raise GateRed("a test failed")

    monkeypatch.setattr(command, "require_green_tiers", red)
    assert command.main() == 1
    assert called == []
    assert "GateRed: a test failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--out", "f.json"], "--out needs --sha"),
        (["--out", "f.json", "--sha", "a", "--device", "cpu"], "--out needs a GPU"),
        (["--out", "f.json", "--sha", "a", "--no-recall"], "leave --no-recall out"),
        (["--tokens", "1024"], "must be above 1024"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", "--model", "folder", *options])
    with pytest.raises(SystemExit):
        command.main()
    assert why in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"max_position_embeddings": 1152, "head_dim": 64, "num_attention_heads": 2}
        for name, size in (sizes | {"num_hidden_layers": 2, "initializer_range": 0.2}).items():
            patch.setitem(SIZES, name, size)
        save_tiny(folder)
    return folder


FORMATS = {"int4", "int8", "kivi2"}
MEASURED = [*FORMATS, "engine_int4", FLOOR, "engine_int8"]


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Run]:
    arguments = argparse.Namespace(model=folder, device="cpu", tokens=NUM_TOKENS, threads=1)
    texts = real_texts(LETTERS, 1, arguments.tokens)
    run = Run(arguments, lambda _: None, LETTERS, texts, tasks(LETTERS, arguments.tokens)[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "weights_sha256", lambda _: "ab" * 32)
        seen = [set(run.found) for _ in run.measure([BY_NAME[name] for name in MEASURED])]
        assert seen[0] == FORMATS
        assert seen[1] == FORMATS | {"engine_int4"}
        assert seen[-1] == set(MEASURED)
        yield run


def test_a_tiny_model_loses_by_each_cache_what_its_format_loses(folder: Path, run: Run) -> None:
    """The engine, where keys and values of bfloat16 are older than its float32, as its formats."""
    more = run.more()
    assert json.loads(json.dumps(more)) == more
    assert run.head_dim == ModelConfig.from_folder(folder).head_dim == 64
    assert run.found["int4"]["bytes"] == run.found["engine_int4"]["bytes"] == 72
    assert more["texts"]["code"]["num_scored"] == NUM_TOKENS - SCORED_FROM  # type: ignore[index]
    for text in run.texts:
        kls = {name: run.found[name][text.name]["kl"][0] for name in MEASURED}
        assert 0 < kls["int8"] < kls["int4"] < kls["kivi2"]
        assert kls["engine_int4"] == pytest.approx(kls["int4"], rel=0.3)
        assert kls[FLOOR] < kls["engine_int8"] < 0.1 * kls["engine_int4"]
        above = run.found["engine_int4"][text.name]["kl_above_floor"][0]
        assert above == pytest.approx(kls["engine_int4"] - kls[FLOOR])
    assert {row.case for row in rows_of(run.found)} > {"kl_int8", PASSKEY_EQUAL}


@pytest.mark.parametrize("num_tokens", [1026, 1152])
def test_texts_forced_by_blocks_say_what_decodes_say(folder: Path, num_tokens: int) -> None:
    """With what is aged, and without; of more sequences than go together."""
    letters = real_texts(LETTERS, 1, 1152)[0].windows[0]
    windows = [[*letters[shift:num_tokens], *letters[:shift]] for shift in range(3)]
    emulated = [BY_NAME[name].emulated for name in ("int4", "kivi2")] + [None]
    session = open_session(folder, "cpu", IN_FLOAT32, len(windows), 1152, 1)
    said: list[dict[int, torch.Tensor]] = []

    def keep(taken: dict[int, torch.Tensor], position: int, came: torch.Tensor) -> None:
        taken[position] = came.clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.quality.session.FORCED_TOGETHER", 2)
        for session._by_blocks in (True, False):
            taken: dict[int, torch.Tensor] = {}
            session.force(windows, emulated, SCORED_FROM, partial(keep, taken))
            said.append(taken)
    assert list(said[0]) == list(said[1]) == list(range(SCORED_FROM - 1, num_tokens - 1))
    for position, came in said[0].items():
        torch.testing.assert_close(came, said[1][position], rtol=1e-3, atol=1e-4)
