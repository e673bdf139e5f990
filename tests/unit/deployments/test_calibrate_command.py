"""`flashray calibrate` on a tiny model, whose tokens are bytes: files, words and refusals."""

import hashlib
from pathlib import Path

import pytest

from deployments.calibrate_command import windows_of
from deployments.cli import main
from deployments.model_files import prepare_model
from engine.build import weights_sha256
from engine.cache.calibration import Calibration
from engine.cache.tier_config import TierConfig
from router.text.tokenizer import Tokenizer
from tests.fakes.checkpoint import byte_llama, tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Tiny-Llama"
    return byte_llama(folder, head_dim=32, max_position_embeddings=2048)


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def text_of(num_bytes: int) -> Path:
    text = Path("text.txt")
    text.write_bytes(bytes(97 + index * index % 23 for index in range(num_bytes)))
    return text


def test_the_file_holds_what_was_measured_on_both_ends_of_the_text(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(5000)
    options = ["--plot", "errors.svg", "--cold-format", "int4", "--max-error", "0.04"]

    assert main(["calibrate", str(model), str(text), *options]) == 0

    found = Calibration.read(Path("tiny-llama.calibration.json"))
    assert found.model == "tiny-llama"
    assert found.num_tokens == (2048, 2048)  # the context
    assert found.tiers == TierConfig(cold_format="int4")
    assert found.text_sha == hashlib.sha256(text.read_bytes()).hexdigest()
    (folder,) = Path("cache/models").glob("tiny-llama-*[0-9a-f]")
    found.refuse_other_model(weights_sha256(folder), 2)
    for layer, kept in enumerate(found.cold_formats):
        errors = [found.errors[name][layer] for name in ("int4", "k8v4", "int8")]
        assert errors == sorted(errors, reverse=True)
        assert found.errors[kept][layer] <= 0.04 or kept == "int8"
    assert Path("errors.svg").read_text().startswith("<svg")
    said = capsys.readouterr()
    assert "tiny-llama: 4,096 tokens in windows of 2048, 2048" in said.out
    assert "calibration  tiny-llama.calibration.json" in said.out
    assert "measuring 4/4 layers" in said.err


@pytest.mark.parametrize(
    ("num_bytes", "lengths"),
    [(1599, (1599,)), (1599 + 1534, (1599,)), (1599 + 1535, (1599, 1535)), (9000, (1599, 1599))],
)
def test_windows_are_the_start_of_the_text_and_its_end(
    num_bytes: int, lengths: tuple[int, ...], model: Path
) -> None:
    files, text = prepare_model(str(model)), text_of(num_bytes)
    token_ids = Tokenizer.from_folder(files.path).encode(text.read_text())

    windows = windows_of(files, text, text.read_text(), 1600, 1536)

    assert [each[0] for each in windows] == [1] * len(lengths)  # as prompts begin
    assert [tuple(each[1:]) for each in windows] == [
        tuple(part) for part in (token_ids[: lengths[0]], token_ids[-lengths[-1] :])[: len(lengths)]
    ]


def test_a_short_text_is_one_window_of_its_own_length(model: Path) -> None:
    options = ["--tokens", "1600", "--out", "found.json"]
    assert main(["calibrate", str(model), str(text_of(2000)), *options]) == 0
    assert Calibration.read(Path("found.json")).num_tokens == (1600,)


def test_the_same_text_gives_the_same_file(model: Path) -> None:
    for name in ("one.json", "two.json"):
        main(["calibrate", str(model), str(text_of(1700)), "--out", name])
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens", "1024"], "--tokens must be at least 1,536"),
        (["--max-error", "0"], "--max-error must be above 0"),
        (["--max-error", "nan"], "--max-error must be above 0"),
        (["--plot", "errors.png"], "name a file that ends in .svg, got errors.png"),
        (["--out", "no/where.json"], "no/where.json: there is no folder"),
        (["--plot", "no/where.svg"], "no/where.svg: there is no folder"),
        (["--out", "."], "is a folder; name a file"),
    ],
)
def test_options_that_cannot_be_are_refused_at_once(
    options: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(model), str(text_of(5000)), *options]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "measuring" not in error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"a" * 1534,
            "text.txt has 1,534 tokens of tiny-llama, a calibration needs at least 1,535",
        ),
        (b"", "text.txt has 0 tokens"),
        (b"abc\xff", "text.txt: expected UTF-8 text, at byte 3"),
        (None, "text.txt: expected a text file, No such file"),
    ],
)
def test_texts_that_cannot_be_measured_on_are_refused(
    content: bytes | None, said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("text.txt").write_bytes(content)
    assert main(["calibrate", str(model), "text.txt"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("context", "said"),
    [
        (1024, "checkpoint has a context of 1,024 tokens, a calibration needs 1,536"),
        (2048, "a tiered cache needs a head_dim of at least 32, this model's is 8"),
    ],
)
def test_models_that_have_no_cold_tier_are_refused(
    context: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_checkpoint(tmp_path / "checkpoint", max_position_embeddings=context)
    assert main(["calibrate", str(tmp_path / "checkpoint"), str(text_of(5000))]) == 1
    assert said in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "no-model", str(text_of(5000))]) == 1
    assert "model 'no-model': expected" in capsys.readouterr().err
