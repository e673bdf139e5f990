import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError, UnsupportedModel
from engine.models.model_config import ModelConfig
from tests.unit.engine.tiny_checkpoint import LLAMA3_ROPE, SIZES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "eos_token_id": 2,
    **SIZES,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def read(folder: Path, **changes: Any) -> ModelConfig:
    return ModelConfig.from_folder(write(folder, **changes))


def test_every_field_of_a_llama(tmp_path: Path) -> None:
    config = read(tmp_path, rope_parameters=LLAMA3_ROPE, rms_norm_eps=1e-5)

    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (199, 48, 80)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 6, 2)
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-5
    assert config.rope.rope_type == "llama3"
    assert config.rope.theta == 500_000.0
    assert config.rope.original_context_len == 32
    assert config.sliding_windows == (None, None, None)
    assert not config.tie_embeddings
    assert config.max_position_embeddings == 256
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (2,)


def test_old_spelling_of_rope_and_dtype(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        dtype=None,
        torch_dtype="float16",
        rope_theta=5_000.0,
        rope_scaling={"type": "linear", "factor": 2.0},
    )

    assert config.dtype == "float16"
    assert (config.rope.rope_type, config.rope.theta, config.rope.factor) == ("linear", 5000.0, 2.0)


def test_head_dim_follows_from_the_hidden_size(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=None).head_dim == 8


def test_the_generation_config_names_the_stop_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')

    assert read(tmp_path).eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, (32, 32, 32)),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": None,
            },
            (None, None, None),
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, (None, None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 32, 32),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (32, None, 32),
        ),
        ({}, (None, None, None)),
    ],
    ids=["mistral", "mistral off", "qwen2 off", "qwen2", "qwen3 layer types", "llama ignores it"],
)
def test_sliding_windows(
    tmp_path: Path, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(tmp_path, **{"sliding_window": 32} | changes).sliding_windows == windows


def test_what_tells_the_qwens_apart(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"], model_type="qwen2").architecture
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3").architecture

    assert (qwen2.has_qkv_bias, qwen2.has_qk_norm) == (True, False)
    assert (qwen3.has_qkv_bias, qwen3.has_qk_norm) == (False, True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "MLA"),
        ({"architectures": ["MixtralForCausalLM"]}, "MoE"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "MoE"),
        ({"architectures": None}, "none named"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq.*unquantized"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic.*yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"dtype": "float64"}, "float64"),
        ({"head_dim": 15}, "even"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"hidden_size": "many"}, "config.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"(?s){named}"):
        read(tmp_path, **changes)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Hugging Face folder"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="JSON"):
        ModelConfig.from_folder(tmp_path)
