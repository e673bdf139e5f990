"""Attention of short prompts as CUDA graphs: one for each layer and padded number of rows.

Launched by itself that of a prompt of some hundred tokens takes the host three times as long as it
takes the GPU. Long contexts are not for it: one launch, which cuts none, leaves most of a GPU idle.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from engine.execution.recorder import Recorder, Results
from engine.execution.triton_attention import BLOCK_SIZE, PagedRows

SIZES = (1024, 512, 256)
MOST_PROMPTS, MOST_TOKENS = 8, 1024  # in a step, and of a context


class PromptAttention(Protocol):
    """Attention of chunks that can be recorded. `metadata` is the backend's own, of `prepare`."""

    def chunks_of(self, metadata: Any) -> PagedRows | None: ...

    def attend_recorded(self, layer: int, query: torch.Tensor, chunks: PagedRows) -> torch.Tensor:
        """Of tokens that the cache holds by now; `query` is turned, of rows of which some are of
        no chunk, and of these the result is anything."""


class PromptAttentionGraphs:
    """From the rows of `query` that are of prompts to those of `attended`, [num_tokens, num_heads,
    head_dim] both, which stay where they are."""

    def __init__(
        self,
        backend: PromptAttention,
        recorder: Recorder,
        query: torch.Tensor,
        attended: torch.Tensor,
    ) -> None:
        self._backend = backend
        self._recorder = recorder
        self._query = query
        self._attended = attended
        device, shape = query.device, (MOST_PROMPTS, MOST_TOKENS // BLOCK_SIZE)
        self._tables = torch.zeros(shape, dtype=torch.int64, device=device)
        self._context_lens = torch.zeros(MOST_PROMPTS, dtype=torch.int64, device=device)
        self._starts = torch.zeros(MOST_PROMPTS + 1, dtype=torch.int32, device=device)
        self._is_prompt = torch.zeros((len(query), 1, 1), dtype=torch.bool, device=device)
        self._replays: dict[int, tuple[Callable[[], None], ...]] = {}

    def record(self, size: int, num_layers: int) -> None:
        """`size` rows at most."""
        self._replays[size] = tuple(
            self._recorder.record(partial(self._attend, layer, size))[1]
            for layer in range(num_layers)
        )

    def place(self, metadata: Any) -> tuple[Callable[[], None], ...] | None:
        """-> of each layer what attends; None where no prompts came, or not all of them fit."""
        chunks = self._backend.chunks_of(metadata)
        if chunks is None or not self._fits(chunks):
            return None
        assert chunks.query_starts is not None
        num_prompts, num_blocks = chunks.block_tables.shape
        self._tables[:num_prompts, :num_blocks].copy_(chunks.block_tables)
        self._context_lens.zero_()
        self._context_lens[:num_prompts].copy_(chunks.context_lens)
        self._starts.fill_(chunks.rows.stop)
        self._starts[:num_prompts].copy_(chunks.query_starts[:-1] + chunks.rows.start)
        self._is_prompt.zero_()
        self._is_prompt[chunks.rows] = True
        return self._replays[min(size for size in self._replays if size >= chunks.rows.stop)]

    def _fits(self, chunks: PagedRows) -> bool:
        num_prompts, num_blocks = chunks.block_tables.shape
        is_short = num_prompts <= MOST_PROMPTS and num_blocks * BLOCK_SIZE <= MOST_TOKENS
        return is_short and chunks.rows.stop <= max(self._replays, default=0)

    def _attend(self, layer: int, size: int) -> Results:
        rows = slice(0, size)
        chunks = PagedRows(rows, self._tables, self._context_lens, self._starts, (size,))
        attended = self._backend.attend_recorded(layer, self._query[rows], chunks)
        torch.where(self._is_prompt[rows], attended, self._attended[rows], out=self._attended[rows])
        return ()


def prompt_sizes(max_rows: int) -> list[int]:
    """Largest first, of steps of at most so many rows."""
    return sorted({min(size, max_rows) for size in SIZES}, reverse=True)
