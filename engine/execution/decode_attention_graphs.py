"""Attention of a step's single tokens as CUDA graphs: one for each layer and padded number."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from engine.execution.recorder import Recorder, Results

TablesShape = tuple[int, ...]


class DecodeTables(Protocol):
    """What the attention of single tokens reads, in tensors that stay where they are."""

    @property
    def most(self) -> int:
        """Tokens that there is room for."""

    def record(self, size: int, recorder: Recorder) -> tuple[Any, Callable[[], None]]:
        """-> the first `size` rows, as `attend_decodes` takes them, and what is to be done before
        it whenever tokens were placed in them. Nothing of it is memory of the recorder, where
        graphs that run in between keep what they are through with."""

    def place(self, decodes: Any) -> int:
        """In the first rows; all others are nobody's. -> how many."""


class SingleAttention(Protocol):
    """Attention of single tokens that can be recorded."""

    def decode_tables(self, shape: TablesShape) -> DecodeTables:
        """shape: the most sequences, and how wide the tables are that the slots have."""

    def attend_decodes(self, layer: int, query: torch.Tensor, decodes: Any) -> torch.Tensor:
        """Of tokens that the cache holds by now; `query` is turned, of the whole step."""


@dataclass(frozen=True, slots=True)
class RecordedDecodes:
    """`prepare` runs once a step, `replays` layer by layer. `decodes`: what they read, kept."""

    decodes: Any
    prepare: Callable[[], None]
    replays: tuple[Callable[[], None], ...]


class DecodeAttentionGraphs:
    """From the first rows of `query` to those of `attended`, [num_tokens, num_heads, head_dim]
    both, which stay where they are."""

    def __init__(
        self,
        backend: SingleAttention,
        recorder: Recorder,
        query: torch.Tensor,
        attended: torch.Tensor,
        tables_shape: TablesShape,
    ) -> None:
        """tables_shape: as `SingleAttention.decode_tables`."""
        self._backend = backend
        self._recorder = recorder
        self._query = query
        self._attended = attended
        self._tables = backend.decode_tables(tables_shape)
        self._steps: dict[int, RecordedDecodes] = {}

    @property
    def most(self) -> int:
        return self._tables.most

    def record(self, size: int, num_layers: int) -> None:
        decodes, prepare = self._tables.record(size, self._recorder)
        replays = tuple(
            self._recorder.record(partial(self._attend, layer, size, decodes))[1]
            for layer in range(num_layers)
        )
        self._steps[size] = RecordedDecodes(decodes, prepare, replays)

    def place(self, decodes: Any) -> tuple[Callable[[], None], ...]:
        """-> of each layer what attends. Rows behind the decodes' change too."""
        num_decodes = self._tables.place(decodes)
        step = self._steps[min(size for size in self._steps if size >= num_decodes)]
        step.prepare()
        return step.replays

    def _attend(self, layer: int, size: int, decodes: Any) -> Results:
        attended = self._backend.attend_decodes(layer, self._query, decodes)
        self._attended[:size].copy_(attended)
        return ()


def attention_sizes(max_num_sequences: int) -> list[int]:
    """Largest first, powers of 2: by this number the kernel cuts the contexts into programs."""
    powers = [1 << power for power in range(max_num_sequences.bit_length())]
    return [max_num_sequences, *(each for each in reversed(powers) if each < max_num_sequences)]
