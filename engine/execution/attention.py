"""How a layer stores its new keys and values and attends over the cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.errors import EngineError
from engine.execution.inputs import Chunks, ModelInputs, QuerySpan, StepInputs, build_inputs
from engine.execution.kv_tensors import KVTensors
from kernels.paged_attention.api import causal_mask, paged_attention
from kernels.rope_append.api import rope_append


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """What all layers of a step share, made once. `masks` has an entry per span for each window
    that occurs in the model."""

    slot_mapping: torch.Tensor
    spans: tuple[QuerySpan, ...]
    masks: dict[int | None, tuple[torch.Tensor, ...]]


class AttentionBackend(Protocol):
    """Inputs, beyond those that all need, and `metadata` are a backend's own: what all layers of a
    step share."""

    def build_inputs(self, batch: Chunks) -> StepInputs:
        """In the order of rows that this backend attends in."""

    def prepare(self, inputs: Any) -> Any:
        """The metadata, once a step, before the first layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        metadata: Any,
    ) -> torch.Tensor:
        """As `engine.models.decoder.Attend`: a token sees itself. In the last layer what is not
        sampled may be anything, for nothing looks at it."""


class ReferenceAttention:
    """Plain PyTorch over the block table, exact, on any device."""

    def __init__(
        self,
        kv: KVTensors,
        windows: Iterable[int | None],
        scale: float,
        *,
        deterministic: bool = False,
    ) -> None:
        """`windows` of the layers in order: keys a query sees, None for all. Raises EngineError."""
        if deterministic and kv.device.type == "cuda":
            raise EngineError(
                "deterministic needs the attention kernels on a GPU; leave attention_backend at "
                "auto, or choose triton"
            )
        self._kv = kv
        self._windows = tuple(windows)
        self._scale = scale

    def build_inputs(self, batch: Chunks) -> ModelInputs:
        return build_inputs(batch, self._kv.block_size, self._kv.device)

    def prepare(self, inputs: ModelInputs) -> AttentionMetadata:
        masks = {
            window: tuple(self._mask(span, window) for span in inputs.spans)
            for window in dict.fromkeys(self._windows)
        }
        return AttentionMetadata(inputs.slot_mapping, inputs.spans, masks)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        query = rope_append(query, key, value, cos, sin, keys, values, metadata.slot_mapping)
        masks = metadata.masks[self._windows[layer]]
        attended = [
            paged_attention(
                query[span.rows].unflatten(0, (span.num_sequences, span.query_len)),
                keys,
                values,
                span.block_tables,
                mask,
                self._scale,
            ).flatten(0, 1)
            for span, mask in zip(metadata.spans, masks, strict=True)
        ]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _mask(self, span: QuerySpan, window: int | None) -> torch.Tensor:
        num_keys = span.block_tables.shape[1] * self._kv.block_size
        dtype = self._kv.keys[0].dtype
        return causal_mask(span.context_lens, span.query_len, num_keys, window, dtype)
