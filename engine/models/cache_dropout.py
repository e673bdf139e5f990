"""Cache dropout: fine-tuning a Hugging Face model on a history that has aged as in a tiered cache.

As dropout does with activations, each layer of each forward pass takes the aged history or the
exact one by chance, so that the model learns to bear the one and keeps working with the other.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.cache.formats import BLOCK_SIZE
from engine.cache.tier_config import TierConfig
from engine.models.aged_attention import aged_attention, has_aged
from engine.models.calibrate import refuse_head_dim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = "sdpa"
UNSUPPORTED = ("position_bias", "s_aux", "softcap")


@contextmanager
def cache_dropout(
    model: "PreTrainedModel",
    tiers: TierConfig,
    *,
    probability: float = 1.0,
    hide_cold: bool = False,
) -> Iterator[None]:
    """Within it the attention of `model` sees history as decoded tokens do (`decode_ages`), each
    layer with `probability` by torch's random numbers, in training and in evaluation alike.

    `hide_cold`: what is older than warm is not seen at all, whatever its format. A token's position
    is its place in its row, padding counted. Raises ValueError for arguments that cannot be,
    UnsupportedModel for heads that a tiered cache cannot hold. The forward pass raises ValueError
    for what it cannot compute, such as rows that continue others.
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be between 0 and 1, got {probability}")
    if tiers.exact:
        raise ValueError("exact keeps everything in bf16, so that nothing ages; name a cold_format")
    if tiers.block_size != BLOCK_SIZE:
        raise ValueError(f"block_size must be {BLOCK_SIZE}, got {tiers.block_size}")
    before = model.config._attn_implementation
    if before != BASE:
        raise ValueError(
            f"cache dropout needs a model whose attention is {BASE!r}, this one's is {before!r}; "
            f"call model.set_attn_implementation({BASE!r}) first"
        )
    refuse_head_dim(_head_dim(model))
    model.set_attn_implementation(_registered(AgingAttention(tiers, probability, hide_cold)))
    try:
        if model.config._attn_implementation == before:
            raise ValueError(f"{type(model).__name__} takes no other attention function")
        yield
    finally:
        model.set_attn_implementation(before)


def _head_dim(model: "PreTrainedModel") -> int:
    config = model.config.get_text_config()
    head_dim: int | None = getattr(config, "head_dim", None)
    return head_dim or config.hidden_size // config.num_attention_heads


def _registered(attention: "AgingAttention") -> str:
    """Its name. Equal ones share it: a context a step leaves one entry behind, not many."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = f"cache dropout: {attention}"
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


@dataclass(frozen=True, slots=True)
class AgingAttention:
    """An attention function of transformers' AttentionInterface."""

    tiers: TierConfig
    probability: float
    hide_cold: bool

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [batch, num_heads, num_tokens, head_dim], turned; key, value of num_kv_heads;
        attention_mask bool [batch, 1, num_tokens, num_tokens] -> [batch, num_tokens, num_heads,
        head_dim]. Raises ValueError."""
        _refuse(module, query, key, attention_mask, options)
        if not has_aged(self.tiers, query.shape[2]) or torch.rand(()).item() >= self.probability:
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            exact: torch.Tensor = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, **options
            )[0]
            return exact, None
        aged = aged_attention(
            query,
            key,
            value,
            self.tiers,
            hide_cold=self.hide_cold,
            is_visible=attention_mask,
            scale=scaling,
            dropout=dropout,
        )
        return aged.transpose(1, 2).contiguous(), None


def _refuse(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> None:
    """Raises ValueError."""
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"cache dropout needs whole rows, got {query.shape[2]} queries of {key.shape[2]} keys; "
            "pass no past_key_values"
        )
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        raise ValueError(
            f"cache dropout needs an attention mask of bool, got {attention_mask.dtype}"
        )
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise ValueError("cache dropout needs causal attention")
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(f"cache dropout cannot compute attention with {name}")
