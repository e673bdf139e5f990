"""Small random checkpoints of every architecture, written by transformers itself."""

from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide: logits far apart, mistakes visible
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, linear rope": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, yarn rope": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral, every layer windowed": ("Mistral", {"sliding_window": 24}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2, qkv bias": ("Qwen2", {"head_dim": 8}),
    "qwen2, upper layers windowed": (
        "Qwen2",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen2, yarn rope": ("Qwen2", {"head_dim": 8, "rope_parameters": YARN_ROPE}),
    "qwen3, qk norm": ("Qwen3", {}),
}


def build_model(variant: str) -> Any:
    """A transformers model with random weights, norms and biases included."""
    import transformers

    family, changes = VARIANTS[variant]
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.uniform_(0.5, 1.5)
    return model


def save_tiny(folder: Path, variant: str = "llama", **save_options: Any) -> Any:
    """Write the variant's folder and return the transformers model it holds."""
    model = build_model(variant)
    model.save_pretrained(folder, **save_options)
    return model
