from pathlib import Path

import pytest
import torch

from engine.models.decoder import Decoder, build_decoder
from engine.models.model_config import ModelConfig
from engine.models.weights import load_weights
from kernels.linear.api import LINEARS, LinearPlan
from kernels.rotary.api import rotary
from tests.kernels.launches import launches_of
from tests.unit.engine.tiny_checkpoint import save_tiny


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "qwen3, qk norm")
    config = ModelConfig.from_folder(folder)
    return build_decoder(config, load_weights(folder, config, torch.float32))


def attend_to_self(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


@torch.inference_mode()
def test_every_layer_attends_once_in_order_with_shaped_heads(decoder: Decoder) -> None:
    calls = []

    def attend(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
        calls.append((layer, *[tuple(each.shape) for each in tensors]))
        return attend_to_self(layer, *tensors)

    hidden = decoder.forward(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2]), attend)

    assert hidden.shape == (3, 48)
    heads, turns = [(3, 6, 16), (3, 2, 16), (3, 2, 16)], [(3, 1, 16)] * 2
    assert calls == [(layer, *heads, *turns) for layer in range(3)]


@torch.inference_mode()
def test_the_embedding_is_not_written_to(decoder: Decoder) -> None:
    before = decoder.weights.embedding.clone()

    decoder.forward(torch.tensor([5]), torch.tensor([0]), attend_to_self)

    assert torch.equal(decoder.weights.embedding, before)


@torch.inference_mode()
def test_positions_turn_by_their_angles_and_nothing_else(decoder: Decoder) -> None:
    seen: list[tuple[torch.Tensor, ...]] = []

    def attend(layer: int, *tensors: torch.Tensor) -> torch.Tensor:
        if layer == 0:
            seen.append(tensors)
        return attend_to_self(layer, *tensors)

    for position in (0, 9):
        decoder.forward(torch.tensor([5]), torch.tensor([position]), attend)

    (*near, cos, sin), (*far, far_cos, far_sin) = seen
    assert all(map(torch.equal, near, far))  # what the angles turn
    assert not torch.allclose(cos, far_cos)
    turned = rotary(near[0], cos, sin), rotary(near[0], far_cos, far_sin)
    assert not torch.allclose(*turned)
    torch.testing.assert_close(turned[0].norm(dim=-1), turned[1].norm(dim=-1))  # not scaled


@torch.inference_mode()
def test_rows_are_those_of_the_whole(decoder: Decoder) -> None:
    inputs = torch.tensor([5, 6, 7, 5]), torch.tensor([0, 1, 2, 3])
    whole = decoder.forward(*inputs, attend_to_self)
    for rows in ([3, 1], [], [0, 1, 2, 3]):
        of_rows = decoder.forward(*inputs, attend_to_self, torch.tensor(rows, dtype=torch.int64))
        torch.testing.assert_close(of_rows, whole[rows])


@torch.inference_mode()
def test_logits_are_float32_and_of_the_rows_given(decoder: Decoder) -> None:
    hidden = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))

    logits = decoder.logits(hidden)

    assert logits.dtype == torch.float32
    assert logits.shape == (4, 199)
    torch.testing.assert_close(decoder.logits(hidden[2:3]), logits[2:3], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_logits_of_a_narrow_model_are_never_rounded(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3, qk norm")
    config = ModelConfig.from_folder(tmp_path)
    decoder = build_decoder(config, load_weights(tmp_path, config, torch.bfloat16))
    decoder.weights.lm_head.plan = LinearPlan({1: LINEARS[0]})
    hidden = torch.randn(1, 48, generator=torch.Generator().manual_seed(0)).bfloat16()

    ((_, variant),) = launches_of(lambda: decoder.logits(hidden))

    assert variant.dtypes == (*[torch.bfloat16] * 3, torch.float32)
