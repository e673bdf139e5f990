"""Shapes of models whose weights do not matter: a config.json is all that an engine needs."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

BYTES_PER_NUMBER = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float
    tie_embeddings: bool

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_NUMBER

    @property
    def read_weight_bytes(self) -> int:
        """Weights that a decode step reads: all but the rows of the embedding that it looks up."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        return BYTES_PER_NUMBER * (self.num_layers * layer + self.hidden_size * self.vocab_size)

    def write(self, folder: Path, max_model_len: int) -> Path:
        """The folder, which need not exist, with its config.json."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": max_model_len,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return folder


LLAMA_8B = Shape("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256, 5e5, False)
SMOLLM2_135M = Shape("smollm2-135m", 576, 1536, 30, 9, 3, 64, 49152, 1e5, True)
SMOLLM2_SHALLOW = replace(SMOLLM2_135M, name="smollm2-135m, 4 layers", num_layers=4)
