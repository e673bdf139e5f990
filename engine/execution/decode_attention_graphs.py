"""Attention of a step's single tokens as CUDA graphs: one for each layer and padded number."""

from collections.abc import Callable
from functools import partial

import torch

from engine.execution.recorder import Recorder, Results
from engine.execution.triton_attention import PagedRows, TritonAttention


class DecodeAttentionGraphs:
    """From the first rows of `query` to those of `attended`, [num_tokens, num_heads, head_dim]
    both, which stay where they are."""

    def __init__(
        self,
        backend: TritonAttention,
        recorder: Recorder,
        query: torch.Tensor,
        attended: torch.Tensor,
        tables_shape: tuple[int, int],
    ) -> None:
        """tables_shape: the most sequences, and the most blocks of one."""
        self._backend = backend
        self._recorder = recorder
        self._query = query
        self._attended = attended
        self._tables = torch.zeros(tables_shape, dtype=torch.int64, device=query.device)
        self._context_lens = torch.zeros(tables_shape[0], dtype=torch.int64, device=query.device)
        self._replays: dict[int, tuple[Callable[[], None], ...]] = {}

    @property
    def most(self) -> int:
        return len(self._tables)

    def record(self, size: int, num_layers: int) -> None:
        rows = slice(0, size)
        decodes = PagedRows(rows, self._tables[rows], self._context_lens[rows], None, 1)
        self._replays[size] = tuple(
            self._recorder.record(partial(self._attend, layer, decodes))[1]
            for layer in range(num_layers)
        )

    def place(self, decodes: PagedRows) -> tuple[Callable[[], None], ...]:
        """-> of each layer what attends. Rows behind the decodes' change too."""
        num_decodes, num_blocks = decodes.block_tables.shape
        self._tables[:num_decodes, :num_blocks].copy_(decodes.block_tables)
        self._context_lens[:num_decodes].copy_(decodes.context_lens)
        self._context_lens[num_decodes:].fill_(0)
        return self._replays[min(size for size in self._replays if size >= num_decodes)]

    def _attend(self, layer: int, decodes: PagedRows) -> Results:
        attended = self._backend.attend_decodes(layer, self._query, decodes)
        self._attended[decodes.rows].copy_(attended)
        return ()


def attention_sizes(max_num_sequences: int) -> list[int]:
    """Largest first, powers of 2: by this number the kernel cuts the contexts into programs."""
    powers = [1 << power for power in range(max_num_sequences.bit_length())]
    return [max_num_sequences, *(each for each in reversed(powers) if each < max_num_sequences)]
