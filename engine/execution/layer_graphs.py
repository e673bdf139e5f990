"""A step of few tokens with a prompt among them: all but the attention of prompts as CUDA graphs.

Launched one by one its kernels take the host longer than the GPU. Attention stays apart: it alone
depends on how the tokens are dealt out to sequences. Between that of one layer and of the next lies
one graph, which ends a layer and begins another.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from engine.execution.decode_attention_graphs import (
    DecodeAttentionGraphs,
    SingleAttention,
    TablesShape,
    attention_sizes,
)
from engine.execution.inputs import StepInputs
from engine.execution.prompt_attention_graphs import (
    PromptAttention,
    PromptAttentionGraphs,
    prompt_sizes,
)
from engine.execution.recorder import Recorder, Results
from engine.execution.uploads import upload
from engine.models.decoder import Decoder

# Beyond them the GPU takes longer than the host. From some 200 rows on a row of padding takes as
# long as any, 19 us of a Llama 3.1 8B on an H200, where cuBLAS (torch 2.11) is as fast with these
# numbers as with any a little less: 448 rows take it longer than 512.
SIZES = (1024, 896, 768, 640, 512, 432, 384, 320, 288, 256, 192, 160, 128, 96, 64, 32, 16)
PADDING = (0, 0)  # token id and position, of a token whose slot is nowhere


class LayerBackend(SingleAttention, Protocol):
    """Attention in parts, of which the one for single tokens and what is the same for all tokens
    can be recorded. `metadata` is the backend's own, of `prepare`."""

    @property
    def row_padding(self) -> tuple[int, ...]:
        """A column of the backend's own rows, of a token that is stored nowhere."""

    def token_rows(self, metadata: Any) -> tuple[torch.Tensor, ...]:
        """Its own rows, [num_tokens] int64 each: where keys and values go."""

    def append(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: Items[torch.Tensor],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What of a layer's attention depends on no other token, by its own rows of `token_rows`
        -> the turned query, in `out` if that is given."""

    @property
    def prompt_attention(self) -> PromptAttention | None:
        """None where that of prompts cannot be recorded."""

    def decodes_of(self, metadata: Any) -> Any | None:
        """As `DecodeTables.place` takes them. Their rows come before those of prompts."""

    def begin_layer(self, layer: int, metadata: Any) -> None:
        """What is to be done between `append` and all attention of the layer."""

    def attend_prompts(
        self, layer: int, query: torch.Tensor, metadata: Any
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of the step, and what they attended, as long as nobody asks for the next."""


@dataclass(frozen=True, slots=True)
class RecordedLayers:
    """rows [3 and more, size] int64: token ids, positions, and the backend's own. Each of `replays`
    leaves a layer's turned query in its place; the last layer is left to be concluded, with
    `residual` [size, hidden_size] float32. `turns`: what the first replay leaves for the others,
    kept so that no other graph gets its memory."""

    rows: torch.Tensor
    replays: tuple[Callable[[], None], ...]
    residual: torch.Tensor
    turns: tuple[torch.Tensor, torch.Tensor]


class LayerGraphs:
    """Of one rank, with attention by the kernels."""

    def __init__(
        self,
        decoder: Decoder,
        backend: LayerBackend,
        recorder: Recorder,
        tables_shape: TablesShape,
    ) -> None:
        """tables_shape: as `SingleAttention.decode_tables`."""
        self._decoder = decoder
        self._backend = backend
        self._recorder = recorder
        config, weights = decoder.config, decoder.weights
        shape = (max(SIZES), config.num_heads, config.head_dim)
        self._query = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        self._attended = torch.zeros_like(self._query)
        self._layers: dict[int, RecordedLayers] = {}
        self._decodes = DecodeAttentionGraphs(
            backend, recorder, self._query, self._attended, tables_shape
        )
        prompts = backend.prompt_attention
        self._prompts = None
        if prompts is not None:
            self._prompts = PromptAttentionGraphs(prompts, recorder, self._query, self._attended)

    @torch.inference_mode()
    def record(self, sizes: Iterable[int]) -> None:
        """`sizes` of steps, largest first."""
        for size in sizes:
            self._record_layers(size)
        most_decodes = min(max(SIZES), self._decodes.most)
        num_layers = len(self._decoder.weights.layers)
        for size in attention_sizes(most_decodes):
            self._decodes.record(size, num_layers)
        if self._prompts is not None:
            for size in prompt_sizes(max(self._layers)):
                self._prompts.record(size, num_layers)

    def fits(self, inputs: StepInputs) -> bool:
        return len(inputs.input_ids) <= max(self._layers, default=0)

    def forward(self, inputs: StepInputs, metadata: Any) -> torch.Tensor:
        """As `Decoder.forward` of the rows that are sampled, of inputs that fit."""
        size = min(size for size in self._layers if size >= len(inputs.input_ids))
        step = self._layers[size]
        own = self._backend.token_rows(metadata)
        self._place((inputs.input_ids, inputs.positions, *own), step.rows)
        decodes = self._backend.decodes_of(metadata)
        attends = None if decodes is None else self._decodes.place(decodes)
        short = None if self._prompts is None else self._prompts.place(metadata)
        for layer, replay in enumerate(step.replays):
            replay()
            self._backend.begin_layer(layer, metadata)
            if attends is not None:
                attends[layer]()
            # After the decodes, whose padding reaches into the rows of prompts.
            if short is not None:
                short[layer]()
                continue
            for rows, attended in self._backend.attend_prompts(layer, self._query, metadata):
                self._attended[rows].copy_(attended)
        sampled = inputs.sampled_rows
        attended, residual = (
            each.index_select(0, sampled) for each in (self._attended, step.residual)
        )
        return self._decoder.conclude(len(step.replays) - 1, attended, residual)

    def _record_layers(self, size: int) -> None:
        padding = upload(self._padding, self._query.device)
        rows = padding[:, None].repeat(1, size)
        (cos, sin, residual), first = self._recorder.record(partial(self._begin, rows))
        replays = [first]
        for layer in range(1, len(self._decoder.weights.layers)):
            go_on = partial(self._go_on, layer, rows, cos, sin, residual)
            replays.append(self._recorder.record(go_on)[1])
        self._layers[size] = RecordedLayers(rows, tuple(replays), residual, (cos, sin))

    @property
    def _padding(self) -> tuple[int, ...]:
        return (*PADDING, *self._backend.row_padding)

    def _place(self, per_token: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
        for row, values, padding in zip(rows, per_token, self._padding, strict=True):
            row[: len(values)].copy_(values)
            row[len(values) :].fill_(padding)

    def _begin(self, rows: torch.Tensor) -> Results:
        cos, sin = self._decoder.turns(rows[1])
        normed, residual = self._decoder.embed(rows[0])
        self._append(0, normed, rows, cos, sin)
        return cos, sin, residual

    def _go_on(
        self,
        layer: int,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        residual: torch.Tensor,
    ) -> Results:
        normed = self._decoder.conclude(layer - 1, self._attended[: len(residual)], residual)
        self._append(layer, normed, rows, cos, sin)
        return ()

    def _append(
        self,
        layer: int,
        normed: torch.Tensor,
        rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        projected = self._decoder.project(layer, normed)
        out = self._query[: len(normed)]
        self._backend.append(layer, *projected, cos, sin, rows[len(PADDING) :].unbind(), out)


def layer_sizes(max_num_batched_tokens: int) -> list[int]:
    """Largest first: what the steps can be padded to."""
    smaller = [size for size in SIZES if size < max_num_batched_tokens]
    enough = SIZES[: len(SIZES) - len(smaller)][-1:]
    return [*enough, *smaller]
