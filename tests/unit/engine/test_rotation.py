"""A model whose values are rotated by its weights, and whose queries and keys are rotated too, says
what the plain one says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.errors import UnsupportedModel
from engine.models.decoder import Attend, Decoder, build_decoder
from engine.models.model_config import ModelConfig
from engine.models.rotation import refuse_unrotatable, rotate_output, rotate_values
from engine.models.weights import LayerWeights, load_weights
from kernels.linear.api import PackedLinear, pack_linear
from kernels.rotary.api import rotary
from kernels.tiered_append.hadamard import rotated
from tests.unit.engine.tiny_checkpoint import save_tiny

TOKENS = torch.tensor([5, 17, 3, 99, 150, 3, 42])


def attend_plainly(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
    query, key, value, cos, sin = tensors
    return attended(rotary(query, cos, sin), rotary(key, cos, sin), value)


def attend_rotated(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
    query, key, value, cos, sin = tensors
    return attended(rotated(rotary(query, cos, sin)), rotated(rotary(key, cos, sin)), value)


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    heads = (each.transpose(0, 1) for each in (query, key, value))
    of_heads = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return of_heads.transpose(0, 1)


def folded(decoder: Decoder) -> Decoder:
    def fold(layer: LayerWeights) -> LayerWeights:
        qkv, output = layer.qkv, layer.output
        assert isinstance(qkv, PackedLinear)
        assert isinstance(output, PackedLinear)
        num_kv_heads, head_dim = decoder.config.num_kv_heads, decoder.config.head_dim
        weight = rotate_values(qkv.weight.to_dense(), num_kv_heads, head_dim)
        bias = None if qkv.bias is None else rotate_values(qkv.bias, num_kv_heads, head_dim)
        taking = rotate_output(output.weight.to_dense(), head_dim)
        return replace(layer, qkv=pack_linear(weight, bias), output=pack_linear(taking))

    layers = tuple(map(fold, decoder.weights.layers))
    return replace(decoder, weights=replace(decoder.weights, layers=layers))


@torch.inference_mode()
def logits(decoder: Decoder, attend: Attend) -> torch.Tensor:
    return decoder.logits(decoder.forward(TOKENS, torch.arange(len(TOKENS)), attend))


@pytest.fixture(params=["llama", "qwen2, qkv bias", "qwen3, qk norm"])
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    save_tiny(tmp_path, request.param)
    config = ModelConfig.from_folder(tmp_path)
    return build_decoder(config, load_weights(tmp_path, config, torch.float32))


def test_logits_are_those_of_the_plain_model(decoder: Decoder) -> None:
    plain = logits(decoder, attend_plainly)

    torch.testing.assert_close(logits(folded(decoder), attend_rotated), plain, rtol=0, atol=5e-5)


def test_what_attention_stores_are_rotated_values(decoder: Decoder) -> None:
    stored: list[torch.Tensor] = []

    def attend(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
        stored.append(tensors[2])
        return attend_rotated(layer, *tensors)

    for each in (decoder, folded(decoder)):
        logits(each, attend)

    torch.testing.assert_close(stored[3], rotated(stored[0]), rtol=0, atol=1e-5)  # first layers'
    assert not torch.allclose(stored[3], stored[0], atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(6, 2, 16), (3, 1, 1)])
def test_weights_are_multiplied_by_the_matrix_and_rounded_once(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    matrix = rotated(torch.eye(head_dim, dtype=torch.float64))
    num_values = num_kv_heads * head_dim
    qkv = torch.randn((num_heads + 2 * num_kv_heads) * head_dim, 5).to(dtype)
    output = torch.randn(7, num_heads * head_dim).to(dtype)
    before = qkv.clone(), output.clone()

    folded_qkv, folded_output = (
        rotate_values(qkv, num_kv_heads, head_dim),
        rotate_output(output, head_dim),
    )

    assert torch.equal(folded_qkv[:-num_values], qkv[:-num_values])
    exact = torch.block_diag(*[matrix] * num_kv_heads) @ qkv[-num_values:].double()
    within = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(folded_qkv[-num_values:].double(), exact, **within)
    exact = output.double() @ torch.block_diag(*[matrix] * num_heads)
    torch.testing.assert_close(folded_output.double(), exact, **within)
    assert folded_qkv.dtype == folded_output.dtype == dtype
    assert all(map(torch.equal, (qkv, output), before))


@pytest.mark.parametrize("head_dim", [0, 24, 80, 96])
def test_heads_that_no_rotation_is_known_for_are_refused(head_dim: int) -> None:
    for refuse in (
        lambda: refuse_unrotatable(head_dim),
        lambda: rotate_values(torch.zeros(3 * head_dim, 4), 1, head_dim),
        lambda: rotate_output(torch.zeros(4, head_dim), head_dim),
    ):
        with pytest.raises(UnsupportedModel, match=f"is {head_dim}; choose exact"):
            refuse()
