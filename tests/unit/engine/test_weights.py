from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.model_config import ModelConfig
from engine.models.rotation import rotate_output, rotate_values
from engine.models.weights import (
    DecoderWeights,
    dummy_weights,
    find_weight_files,
    load_weights,
    resolve_dtype,
)
from kernels.fp8_linear.api import Fp8Linear, pack_fp8
from kernels.linear.api import PackedLinear, linear
from tests.unit.engine.tiny_checkpoint import SIZES, save_tiny

FILE = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "qwen2, qkv bias")
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    for file in pristine.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(folder, ModelConfig.from_folder(folder), dtype)


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, Any] = load_file(folder / FILE) | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / FILE)


def unpacked(packed: PackedLinear) -> torch.Tensor:
    """The matrix [out_size, in_size], through the only thing a packed weight can do."""
    product = linear(torch.eye(packed.weight.shape[1]), packed)
    return (product if packed.bias is None else product - packed.bias).T


def test_parts_are_stacked_in_order(folder: Path) -> None:
    written = load_file(folder / FILE)
    prefix = "model.layers.1"

    layer = load(folder).layers[1]

    qkv = [written[f"{prefix}.self_attn.{name}_proj.weight"] for name in "qkv"]
    biases = [written[f"{prefix}.self_attn.{name}_proj.bias"] for name in "qkv"]
    gate_up = [written[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert layer.qkv.bias is not None
    assert torch.equal(layer.qkv.bias, torch.cat(biases))
    torch.testing.assert_close(unpacked(layer.qkv), torch.cat(qkv), atol=1e-6, rtol=0)
    assert torch.equal(unpacked(layer.gate_up), torch.cat(gate_up))
    assert torch.equal(layer.input_norm, written[f"{prefix}.input_layernorm.weight"])
    assert layer.output.bias is None


def test_shards_equal_the_single_file(pristine: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2, qkv bias", max_shard_size="40KB")
    assert len(find_weight_files(tmp_path)) > 2

    sharded, single = load(tmp_path), load(pristine)

    assert torch.equal(sharded.embedding, single.embedding)
    for ours, theirs in zip(sharded.layers, single.layers, strict=True):
        assert torch.equal(unpacked(ours.down), unpacked(theirs.down))


def test_values_are_rotated_before_anything_is_packed(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    plain = load(folder).layers[1]
    plain_qkv, plain_output = (each.weight.to_dense() for each in (plain.qkv, plain.output))
    qkv, output = rotate_values(plain_qkv, 2, 8), rotate_output(plain_output, 8)
    bias = rotate_values(plain.qkv.bias, 2, 8)

    rotating = load_weights(folder, config, torch.float32, rotate_values=True).layers[1]
    narrow = load_weights(folder, config, torch.float32, quantization="fp8", rotate_values=True)

    assert torch.equal(rotating.qkv.weight.to_dense(), qkv)
    assert torch.equal(rotating.qkv.bias, bias)
    assert torch.equal(rotating.output.weight.to_dense(), output)
    assert torch.equal(rotating.down.weight.to_dense(), plain.down.weight.to_dense())
    for ours, expected in (
        (narrow.layers[1].qkv, pack_fp8(qkv, bias)),
        (narrow.layers[1].output, pack_fp8(output, None)),
    ):
        assert isinstance(ours, Fp8Linear)
        assert torch.equal(ours.weight.float(), expected.weight.float())
        assert torch.equal(ours.scales, expected.scales)
    assert not torch.allclose(qkv, plain_qkv)


def test_random_weights_are_rotated_too(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    plain, rotating = (
        dummy_weights(config, torch.float32, rotate_values=each).layers[2] for each in (False, True)
    )
    expected = rotate_output(plain.output.weight.to_dense(), 8)
    assert torch.equal(rotating.output.weight.to_dense(), expected)


def test_heads_that_cannot_be_rotated_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "head_dim", 24)
    save_tiny(tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    with pytest.raises(UnsupportedModel, match="power of two, this model's is 24"):
        load_weights(tmp_path, config, torch.float32, rotate_values=True)


def test_tied_embeddings_are_the_head(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama, tied")
    rewrite(tmp_path, {"lm_head.weight": torch.zeros(199, 48)})  # a stored copy is not believed

    weights = load(tmp_path)

    assert torch.equal(unpacked(weights.lm_head), weights.embedding)
    assert weights.embedding.abs().sum() > 0


def test_another_dtype_is_a_cast(folder: Path) -> None:
    weights = load(folder, torch.bfloat16)

    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights.embedding, load(folder).embedding.to(torch.bfloat16))
    assert [each.out_dtype for each in weights.linears] == [None] * 9 + [torch.float32]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (None, rf"{UP} \[80, 48\] is missing from {FILE}"),
        (torch.zeros(80, 47), rf"{FILE}: tensor {UP} must have shape \[80, 48\], found \[80, 47\]"),
        (torch.zeros(1), r"found \[1\]"),  # a broadcast would have filled the matrix with it
        (torch.full((80, 48), float("nan")), f"{FILE}: tensor {UP} holds NaN"),
    ],
    ids=["missing", "misshapen", "would broadcast", "not finite"],
)
def test_a_damaged_tensor_is_named(folder: Path, change: torch.Tensor | None, named: str) -> None:
    rewrite(folder, {UP: change})
    with pytest.raises(CheckpointError, match=named):
        load(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    rewrite(folder, {"model.layers.3.mlp.up_proj.weight": torch.zeros(80, 48)})
    with pytest.raises(CheckpointError, match=f"{FILE}: unexpected tensor model.layers.3.mlp.up"):
        load(folder)


def test_stored_rope_frequencies_are_no_extra(folder: Path) -> None:
    rewrite(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert len(load(folder).layers) == 3


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder: Path, num_bytes: int) -> None:
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[:num_bytes])
    with pytest.raises(CheckpointError, match=f"{FILE} is not a whole safetensors file"):
        load(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / FILE).unlink()
    with pytest.raises(CheckpointError, match=f"{FILE} not found"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_tiny(tmp_path, max_shard_size="40KB")
    shard = find_weight_files(tmp_path)[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} not found"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json must be JSON with a weight_map"):
        load(folder)


@pytest.mark.parametrize(
    ("requested", "checkpoint", "device", "resolved"),
    [
        ("auto", "bfloat16", "cpu", torch.float32),
        ("auto", "float16", "cpu", torch.float32),
        ("auto", "bfloat16", "cuda", torch.bfloat16),
        ("auto", "float32", "cuda:1", torch.float32),
        ("bfloat16", "float32", "cpu", torch.bfloat16),
    ],
)
def test_dtype(requested: str, checkpoint: str, device: str, resolved: torch.dtype) -> None:
    assert resolve_dtype(requested, checkpoint, device) == resolved


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="int8"):
        resolve_dtype("int8", "float32", "cpu")
