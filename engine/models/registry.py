"""The architectures served, and what tells them apart. Anything else is refused by name."""

from dataclasses import dataclass
from enum import Enum

from engine.errors import UnsupportedModel


class WindowRule(Enum):
    """Which layers attend through a sliding window, when the checkpoint names one."""

    NONE = "none"
    EVERY_LAYER = "every layer"
    LAYER_TYPES = "layer_types"


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    window_rule: WindowRule = WindowRule.NONE


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("LlamaForCausalLM"),  # Llama 2 and 3, SmolLM2
        Architecture("MistralForCausalLM", window_rule=WindowRule.EVERY_LAYER),
        Architecture(
            "Qwen2ForCausalLM", has_qkv_bias=True, window_rule=WindowRule.LAYER_TYPES
        ),  # Qwen2 and Qwen2.5
        Architecture("Qwen3ForCausalLM", has_qk_norm=True, window_rule=WindowRule.LAYER_TYPES),
    )
}


def find_architecture(name: str) -> Architecture:
    """Raises UnsupportedModel."""
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedModel(
            f"architecture {name!r} is not served{_reason(name)}; "
            f"choose a checkpoint of {', '.join(sorted(ARCHITECTURES))}"
        )
    return found


def _reason(name: str) -> str:
    if name.startswith("Deepseek"):
        return ": multi-head latent attention (MLA) is not implemented"
    if "Moe" in name or name.startswith("Mixtral"):
        return ": mixture of experts (MoE) is not implemented"
    return ""
