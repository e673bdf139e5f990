"""Attention of any kind, and beside it a record of what the newest token's query looks at."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

import torch
import torch.nn.functional as F

from engine.cache.column import Demotion
from engine.cache.formats import BLOCK_SIZE, Format, Part
from engine.execution.attention import AttentionBackend
from engine.execution.attention_trace import (
    NUM_FIRST,
    NUM_LAST,
    Certificates,
    DemotedBlocks,
    TracedStep,
)
from engine.execution.inputs import Chunks, StepInputs
from engine.execution.stored_keys import StoredKeys
from engine.execution.tiered_attention import TieredAttention
from engine.scheduling.batch import ScheduledBatch, ScheduledSequence

Kind = tuple[Part, Format, Format]


class TracingAttention:
    """Of one sequence: `steps` has one for each token that was sampled."""

    def __init__(
        self,
        backend: AttentionBackend,
        stored: StoredKeys,
        windows: Items[int | None],
        scale: float,
    ) -> None:
        """`windows` of the layers: keys a query sees, None for all."""
        self.steps: list[TracedStep] = []
        self._backend = backend
        self._stored = stored
        self._windows = windows
        self._scale = scale
        self._demoted = [Counter[Kind]() for _ in stored.layer_groups]
        self._weights: list[torch.Tensor] = []  # of the layers of this step so far

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        return self._stored.layer_groups

    def build_inputs(self, batch: Chunks) -> StepInputs:
        assert isinstance(batch, ScheduledBatch), "a trace is of one rank"
        (self._entry,) = batch.scheduled
        self._weights = []
        for counter, demotions in zip(self._demoted, batch.demotions, strict=False):
            _count(counter, demotions)
        return self._backend.build_inputs(batch)

    def prepare(self, inputs: Any) -> Any:
        return self._backend.prepare(inputs)

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
        attended = self._backend.attend(layer, query, key, value, cos, sin, metadata)
        if self._entry.samples:
            newest = self._stored.turned(query[-1:], cos[-1:], sin[-1:])[0]
            keys = self._stored.read(layer, self._entry)
            self._weights.append(weights_of(newest, keys, self._scale, self._windows[layer]))
            if len(self._weights) == len(self._windows):
                self.steps.append(self._step(self._entry))
        return attended

    def _step(self, entry: ScheduledSequence) -> TracedStep:
        weights = torch.stack(self._weights).cpu()
        padded = F.pad(weights, (0, -weights.shape[2] % BLOCK_SIZE))
        first, last = weights[..., :NUM_FIRST], weights[..., -NUM_LAST:]
        parts = (padded.unflatten(2, (-1, BLOCK_SIZE)), first, last)
        masses, first_masses, last_masses = (each.sum(-1).float().numpy() for each in parts)
        demoted = tuple(_demoted(each) for each in self._demoted)
        for counter in self._demoted:
            counter.clear()
        return TracedStep(
            entry.end - 1,
            entry.is_decode,
            self._stored.runs(entry),
            demoted,
            masses,
            first_masses,
            last_masses,
            self._certificates(entry),
        )

    def _certificates(self, entry: ScheduledSequence) -> Certificates | None:
        skipping = self._backend.skipping if isinstance(self._backend, TieredAttention) else None
        if skipping is None or not entry.spans[0].is_decode:
            return None
        shares, left_out = skipping.certificates()
        return Certificates(shares.cpu().numpy(), left_out.cpu().numpy())


def weights_of(
    query: torch.Tensor, keys: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """query [num_heads, head_dim], keys [num_kv_heads, num_tokens, head_dim] float64 -> the softmax
    of the newest token, [num_kv_heads, num_tokens] float64, a mean over the heads of a KV head."""
    grouped = query.double().unflatten(0, (len(keys), -1))
    scores = torch.einsum("kgd,ktd->kgt", grouped, keys) * scale
    if window is not None:
        scores[..., :-window] = float("-inf")
    return scores.softmax(-1).mean(1)


def _count(counter: Counter[Kind], demotions: Iterable[Demotion]) -> None:
    for each in demotions:
        counter[each.part, each.source_format, each.target_format] += len(each.sources)


def _demoted(counter: Counter[Kind]) -> tuple[DemotedBlocks, ...]:
    return tuple(DemotedBlocks(*kind, number) for kind, number in sorted(counter.items()))
