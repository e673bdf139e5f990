import pytest
import torch

from engine.models.decoder import Decoder, build_decoder
from engine.models.model_config import ModelConfig
from engine.models.weights import load_weights
from tests.unit.engine.tiny_checkpoint import save_tiny


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "qwen3, qk norm")
    config = ModelConfig.from_folder(folder)
    return build_decoder(config, load_weights(folder, config, torch.float32))


def attend_to_self(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)


@torch.inference_mode()
def test_every_layer_attends_once_in_order_with_shaped_heads(decoder: Decoder) -> None:
    calls = []

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        calls.append((layer, tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        return attend_to_self(layer, query, key, value)

    hidden = decoder.forward(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2]), attend)

    assert hidden.shape == (3, 48)
    assert calls == [(layer, (3, 6, 16), (3, 2, 16), (3, 2, 16)) for layer in range(3)]


@torch.inference_mode()
def test_the_embedding_is_not_written_to(decoder: Decoder) -> None:
    before = decoder.weights.embedding.clone()

    decoder.forward(torch.tensor([5]), torch.tensor([0]), attend_to_self)

    assert torch.equal(decoder.weights.embedding, before)


@torch.inference_mode()
def test_positions_turn_queries_and_keys_but_not_values(decoder: Decoder) -> None:
    seen: list[tuple[torch.Tensor, ...]] = []

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if layer == 0:
            seen.append((query, key, value))
        return attend_to_self(layer, query, key, value)

    for position in (0, 9):
        decoder.forward(torch.tensor([5]), torch.tensor([position]), attend)

    (query, key, value), (far_query, far_key, far_value) = seen
    assert torch.equal(value, far_value)
    assert not torch.allclose(query, far_query)
    assert not torch.allclose(key, far_key)
    torch.testing.assert_close(query.norm(dim=-1), far_query.norm(dim=-1))  # turned, not scaled


@torch.inference_mode()
def test_logits_are_float32_and_of_the_rows_given(decoder: Decoder) -> None:
    hidden = torch.randn(4, 48, generator=torch.Generator().manual_seed(0))

    logits = decoder.logits(hidden)

    assert logits.dtype == torch.float32
    assert logits.shape == (4, 199)
    torch.testing.assert_close(decoder.logits(hidden[2:3]), logits[2:3], atol=1e-5, rtol=1e-5)
