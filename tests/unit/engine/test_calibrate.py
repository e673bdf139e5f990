"""The measured errors are those of a dense computation in float64, token by token."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.formats import COLD_FORMATS, HOT, Format, Part
from engine.cache.tier_config import TierConfig
from engine.errors import EngineError, UnsupportedModel
from engine.models.calibrate import measure_errors, min_tokens
from engine.models.decoder import Decoder, build_decoder
from engine.models.model_config import ModelConfig
from engine.models.weights import load_weights
from kernels.kv_quantise.reference import (
    dequantised_keys,
    dequantised_values,
    quantised_keys,
    quantised_values,
)
from kernels.linear.api import PackedLinear
from kernels.rotary.api import rotary
from kernels.tiered_append.hadamard import rotated
from tests.unit.engine.test_rotation import attend_plainly
from tests.unit.engine.tiny_checkpoint import SIZES

SMALL = TierConfig(hot_tokens=64, warm_tokens=64, cell_tokens=128)
NUM_LAYERS = 2
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tiny_decoder(folder: Path, family: str = "Llama", **changes: Any) -> Decoder:
    import transformers

    sizes = {"head_dim": 32, "num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 1024}
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes | changes)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    model = ModelConfig.from_folder(folder)
    return build_decoder(model, load_weights(folder, model, torch.float32))


def spied(decoder: Decoder) -> tuple[Decoder, list[Projected]]:
    """With what its layers project, in order."""
    projected: list[Projected] = []

    class Spied(Decoder):
        def project(self, layer: int, normed: torch.Tensor) -> Projected:
            projected.append(super().project(layer, normed))
            return projected[-1]

    return Spied(*(getattr(decoder, each.name) for each in fields(decoder))), projected


def window_of(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(0, 199, (num_tokens,), generator=torch.manual_seed(seed)).tolist()


def stored(heads: torch.Tensor, part: Part) -> dict[Format, torch.Tensor]:
    """heads [num_tokens, num_kv_heads, head_dim], float64; of a block that is not full NaN."""
    hot = rotated(heads).bfloat16()
    found = {Format.BF16: hot.double()}
    for each, bits in ((Format.INT8, 8), (Format.INT4, 4)):
        found[each] = torch.full(heads.shape, torch.nan, dtype=torch.float64)
        for start in range(0, len(heads) - 63, 64):
            for head in range(heads.shape[1]):
                block = hot[start : start + 64, head]
                read_back = (
                    dequantised_keys(quantised_keys(block, bits), bits)
                    if part is Part.KEYS
                    else dequantised_values(quantised_values(block, bits), bits)
                )
                found[each][start : start + 64, head] = read_back
    return found


def attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """query [num_tokens, num_heads, head_dim], keys, values [num_keys, num_kv_heads, head_dim],
    visible [num_tokens, num_keys]."""
    grouped = query.unflatten(1, (keys.shape[1], -1))
    scores = torch.einsum("nkgd,tkd->kgnt", grouped, keys) / query.shape[2] ** 0.5
    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("kgnt,tkd->nkgd", probabilities, values).reshape(query.shape)


def direct_errors(
    decoder: Decoder, projected: list[Projected], tiers: TierConfig
) -> dict[str, list[float]]:
    whole = torch.zeros(NUM_LAYERS, dtype=torch.float64)
    lost = {name: torch.zeros(NUM_LAYERS, dtype=torch.float64) for name in COLD_FORMATS}
    for index, (query, key, value) in enumerate(projected):
        layer, num_tokens = index % NUM_LAYERS, len(query)
        output = decoder.weights.layers[layer].output
        assert isinstance(output, PackedLinear)
        matrix = output.weight.to_dense().double()
        cos, sin = decoder.turns(torch.arange(num_tokens))
        query, key = rotary(query, cos, sin), rotary(key, cos, sin)
        parts = stored(key, Part.KEYS), stored(value, Part.VALUES)
        query, key, value = query.double(), key.double(), value.double()
        window = decoder.config.sliding_windows[layer] or num_tokens
        for start in range(0, num_tokens, 64):
            end = min(start + 64, num_tokens)
            distance = torch.arange(start, end)[:, None] - torch.arange(end)
            visible = (distance >= 0) & (distance < window)
            ages, blocks = tiers.prefill_ages(start), range(start // 64 + 1)
            is_cold = torch.tensor([tiers.format_at(ages, block) != HOT for block in blocks])
            sees = (visible & is_cold.repeat_interleave(64)[:end]).any(1)
            rows, visible = slice(start, end), visible[sees]
            exact = attended(query[rows][sees], key[:end], value[:end], visible)
            whole[layer] += (exact.flatten(1) @ matrix.T).square().sum()
            for name in COLD_FORMATS:
                config = replace(tiers, cold_format=name)
                keys, values = (
                    torch.cat(
                        [
                            parts[part][config.format_at(ages, block)[part]][64 * block :][:64]
                            for block in blocks
                        ]
                    )
                    for part in Part
                )
                tiered = rotated(attended(rotated(query[rows][sees]), keys, values, visible))
                lost[name][layer] += ((tiered - exact).flatten(1) @ matrix.T).square().sum()
    nothing = whole == 0
    return {
        name: (each / whole.masked_fill(nothing, 1)).sqrt().tolist() for name, each in lost.items()
    }


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Qwen3", {"head_dim": 64}),
        ("Mistral", {"sliding_window": 200}),  # the first tokens of a cell reach cold blocks
        (
            "Qwen2",  # the second layer reaches none
            {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1},
        ),
    ],
)
def test_errors_are_those_of_a_dense_computation(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    plain = tiny_decoder(tmp_path, family, **changes)
    decoder, projected = spied(plain)
    windows = [window_of(500, seed=1), window_of(384, seed=2)]  # 500: neither blocks nor cells

    found = measure_errors(decoder, windows, SMALL)

    expected = direct_errors(plain, projected, SMALL)
    assert found == {name: pytest.approx(each, rel=1e-3) for name, each in expected.items()}
    first = {name: errors[0] for name, errors in found.items()}
    assert 0.001 < first["int8"] < first["k8v4"] < first["int4"] < 0.5
    if family == "Qwen2":
        assert {errors[1] for errors in found.values()} == {0.0}


def test_layers_get_what_exact_attention_gives(tmp_path: Path) -> None:
    plain = tiny_decoder(tmp_path)
    decoder, projected = spied(plain)
    window = window_of(400, seed=3)
    measure_errors(decoder, [window], SMALL)
    measured = list(projected)
    projected.clear()

    with torch.inference_mode():
        decoder.forward(torch.tensor(window), torch.arange(400), attend_plainly)

    for ours, theirs in zip(measured, projected, strict=True):
        for each, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(each, other, rtol=0, atol=2e-5)


def test_progress_is_told_after_each_layer_of_each_window(tmp_path: Path) -> None:
    told: list[None] = []
    windows = [window_of(384, seed) for seed in range(3)]
    measure_errors(tiny_decoder(tmp_path), windows, SMALL, lambda: told.append(None))
    assert len(told) == 3 * NUM_LAYERS


@pytest.mark.parametrize(
    "tiers",
    [
        TierConfig(),
        SMALL,
        TierConfig(sink_tokens=0, warm_tokens=0, cell_tokens=64),
        TierConfig(sink_tokens=256, warm_tokens=640),
        TierConfig(sink_tokens=128, hot_tokens=192, warm_tokens=128, cell_tokens=192),
    ],
)
def test_the_shortest_window_has_one_cell_that_sees_cold_blocks(tiers: TierConfig) -> None:
    seeing = [
        position
        for position in range(min_tokens(tiers))
        if tiers.format_at(tiers.prefill_ages(position), tiers.sink_tokens // 64) != HOT
    ]
    assert seeing == list(range(min_tokens(tiers) - tiers.cell_tokens, min_tokens(tiers)))


@pytest.mark.parametrize(("head_dim", "said"), [(48, "power of two"), (16, "at least 32, this")])
def test_heads_that_a_tiered_cache_cannot_hold_are_refused(
    head_dim: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        measure_errors(tiny_decoder(tmp_path, head_dim=head_dim), [], SMALL)


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path)
    decoder.weights.layers[0].post_attention_norm.fill_(torch.inf)
    with pytest.raises(EngineError, match=r"layer 1: .* not finite .* flashray doctor"):
        measure_errors(decoder, [window_of(384, seed=4)], SMALL)
