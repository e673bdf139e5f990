from typing import Any

import pytest
import torch

from engine.models.model_config import _rope
from engine.models.rope import build_rope
from tests.unit.engine.tiny_checkpoint import LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 100_000.0}
LLAMA_31 = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
VARIANTS = {
    "default": DEFAULT_ROPE,
    "linear": LINEAR_ROPE,
    "llama3": LLAMA3_ROPE,
    "llama 3.1": LLAMA_31,
    "yarn": YARN_ROPE,
    "yarn of Qwen2.5": YARN_ROPE | {"rope_theta": 1e6, "original_max_position_embeddings": 32768},
    "yarn, mscale": YARN_ROPE | {"mscale": 0.8, "mscale_all_dim": 1.2},
    "yarn, attention factor": YARN_ROPE | {"attention_factor": 1.25},
    "yarn, no truncation": YARN_ROPE | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
}


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("written", VARIANTS.values(), ids=VARIANTS.keys())
def test_equals_transformers(written: dict[str, Any], head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    source = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=dict(written),
    )
    theirs = LlamaRotaryEmbedding(source)
    positions = torch.tensor([0, 1, 63, 4_000, 131_071])

    ours = build_rope(_rope(source), head_dim)

    torch.testing.assert_close(ours.inverse_frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.scaling == pytest.approx(theirs.attention_scaling, rel=1e-9)
    cos, sin = ours.cos_sin(positions, torch.float32)
    their_cos, their_sin = theirs(torch.zeros(1), positions[None])
    # An angle of 131,071 radians has a float32 spacing of 0.008: the far rows are looser.
    tolerance = torch.tensor([1e-6, 1e-6, 1e-5, 1e-3, 2e-2])[:, None]
    assert ((cos[:, 0] - their_cos[0]).abs() <= tolerance).all()
    assert ((sin[:, 0] - their_sin[0]).abs() <= tolerance).all()


def test_cosines_are_cast_after_they_are_computed() -> None:
    rope = build_rope(_rope_default(), 8)

    cos, sin = rope.cos_sin(torch.tensor([1000]), torch.bfloat16)

    exact, _ = rope.cos_sin(torch.tensor([1000]), torch.float32)
    assert cos.shape == sin.shape == (1, 1, 8)
    assert torch.equal(cos, exact.to(torch.bfloat16))


def _rope_default() -> Any:
    from engine.models.rope import RopeParameters

    return RopeParameters()
