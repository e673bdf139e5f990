import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments import model_files
from deployments.errors import ModelFilesError
from deployments.model_files import (
    BUILT_IN_MODEL,
    MANIFEST,
    locate_source,
    model_name,
    open_model,
    prepare_model,
    verify_model,
)
from tests.fakes.checkpoint import tiny_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "Tiny-Llama")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def rewrite(folder: Path, change: object) -> None:
    weights = weights_of(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_folder_becomes_a_model_with_the_checkpoints_dtype(checkpoint: Path, tmp_path: Path):
    files = prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")
    manifest = files.manifest
    assert files.path.is_absolute()
    assert manifest.name == "tiny-llama"
    assert manifest.dtype == "bfloat16"
    assert manifest.max_model_len == 128
    assert manifest.eos_token_ids == (0,)
    assert manifest.special_tokens["eos_token"] == "!"
    assert (files.path / "chat_template.jinja").read_text().startswith("{% for message")
    verify_model(files)


def test_sharded_folder_keeps_every_weight(tmp_path: Path):
    whole = tiny_checkpoint(tmp_path / "whole")
    sharded = tiny_checkpoint(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    files = prepare_model(str(sharded), cache_dir=tmp_path / "cache")
    expected = weights_of(whole)
    found = weights_of(files.path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_second_call_finds_the_first_conversion(checkpoint: Path, tmp_path: Path, monkeypatch):
    first = prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")
    monkeypatch.setattr(model_files, "_convert", lambda *_: pytest.fail("converted twice"))
    assert prepare_model(str(checkpoint), cache_dir=tmp_path / "cache") == first


def test_racing_callers_convert_once(checkpoint: Path, tmp_path: Path, monkeypatch):
    conversions = []
    convert = model_files._convert

    def counted(*arguments):
        conversions.append(1)
        convert(*arguments)

    monkeypatch.setattr(model_files, "_convert", counted)
    threads = [
        threading.Thread(
            target=prepare_model, args=(str(checkpoint),), kwargs={"cache_dir": tmp_path / "cache"}
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


def test_nan_is_refused_with_file_and_tensor(checkpoint: Path, tmp_path: Path):
    def poison(weights):
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")

    rewrite(checkpoint, poison)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors: tensor .*1\.mlp\.up_proj.*NaN"):
        prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")


def test_wrong_shape_is_refused_with_both_shapes(checkpoint: Path, tmp_path: Path):
    rewrite(checkpoint, lambda weights: weights.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(
        ModelFilesError, match=r"model\.norm\.weight: expected shape \[32\].*\[31\]"
    ):
        prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")


def test_missing_tensor_is_named(checkpoint: Path, tmp_path: Path):
    rewrite(checkpoint, lambda weights: weights.pop("model.layers.0.mlp.down_proj.weight"))
    with pytest.raises(ModelFilesError, match=r"missing, first model\.layers\.0\.mlp\.down_proj"):
        prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")


def test_truncated_safetensors_names_file_and_tensor(checkpoint: Path, tmp_path: Path):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40_000])
    with pytest.raises(ModelFilesError, match=r"model\.safetensors: tensor model\.\S+ is cut off"):
        prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")


def test_garbage_safetensors_names_the_file(checkpoint: Path, tmp_path: Path):
    (checkpoint / "model.safetensors").write_bytes(b"not a checkpoint" * 10)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors: "):
        prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")


def test_truncated_gguf_names_file_and_tensor(tmp_path: Path):
    whole = locate_source(BUILT_IN_MODEL)
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as stream:
        cut.write_bytes(stream.read(60_000_000))
    with pytest.raises(ModelFilesError, match=r"cut\.gguf: .*tensor \S+ ends at byte"):
        prepare_model(str(cut), cache_dir=tmp_path / "cache")


def test_failed_conversion_leaves_nothing_behind(checkpoint: Path, tmp_path: Path):
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    with pytest.raises(ModelFilesError, match="AutoTokenizer cannot read it"):
        prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")
    left = [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    assert left == []


def test_a_changed_cache_file_is_noticed(tmp_path: Path):
    files = prepare_model(str(tiny_checkpoint(tmp_path / "m")), cache_dir=tmp_path / "cache")
    weights = files.path / "model.safetensors"
    content = bytearray(weights.resolve().read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    with pytest.raises(ModelFilesError, match="SHA-256"):
        verify_model(open_model(files.path))
    weights.write_bytes(content[:-10])
    with pytest.raises(ModelFilesError, match=r"model\.safetensors: expected \d+ bytes, found"):
        open_model(files.path)


def test_a_folder_without_manifest_is_no_model(tmp_path: Path):
    with pytest.raises(ModelFilesError, match=MANIFEST):
        open_model(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps({"name": "x"}))
    with pytest.raises(ModelFilesError, match="not a manifest of ours"):
        open_model(tmp_path)


@pytest.mark.parametrize("source", ["/no/such/model", "pyproject.toml"])
def test_unknown_source_says_what_is_expected(source: str):
    with pytest.raises(ModelFilesError, match=r"expected .*a Hugging Face folder"):
        locate_source(source)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", BUILT_IN_MODEL),
        ("Meta Llama 3.1", "meta-llama-3.1"),
        ("model.F16.gguf", "model"),
    ],
)
def test_names_are_plain(file: str, name: str):
    assert model_name(Path(file)) == name


@pytest.mark.model
def test_gguf_conversion_equals_transformers_own(smollm2_path: Path):
    from transformers import AutoModelForCausalLM

    source = locate_source(BUILT_IN_MODEL)
    theirs = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    ).state_dict()
    ours = weights_of(smollm2_path)
    theirs.pop("lm_head.weight", None)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_folder_without_weights_is_a_model_for_dummies_alone(checkpoint: Path, tmp_path: Path):
    whole = prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")
    bare = prepare_model(str(checkpoint), with_weights=False, cache_dir=tmp_path / "cache")
    assert bare.path != whole.path
    (checkpoint / "model.safetensors").unlink()
    bare = prepare_model(str(checkpoint), with_weights=False, cache_dir=tmp_path / "cache")
    assert not list(bare.path.glob("*.safetensors"))
    assert bare.manifest.dtype == "bfloat16"
    assert bare.manifest.special_tokens == whole.manifest.special_tokens
    with pytest.raises(ModelFilesError, match=r"no \.safetensors file"):
        prepare_model(str(checkpoint), cache_dir=tmp_path / "cache")
