"""Recorded attention of prompts touches the rows of prompts alone, wherever they are, and leaves
to others what it has no room for."""

import itertools

import pytest
import torch

from engine.execution.prompt_attention_graphs import (
    MOST_PROMPTS,
    MOST_TOKENS,
    PromptAttentionGraphs,
    prompt_sizes,
)
from engine.execution.triton_attention import BLOCK_SIZE, PagedRows
from tests.unit.engine.test_async_scheduling import Recompute

NUM_ROWS, NUM_LAYERS = 64, 3


class ScaledQueries:
    """Of a chunk: its queries times its context's length, plus its first block and the layer."""

    def chunks_of(self, metadata: PagedRows | None) -> PagedRows | None:
        return metadata

    def attend_recorded(self, layer: int, query: torch.Tensor, chunks: PagedRows) -> torch.Tensor:
        attended = torch.full_like(query, float("nan"))
        assert chunks.query_starts is not None
        starts = chunks.query_starts.tolist()
        for nth, (start, end) in enumerate(itertools.pairwise(starts)):
            length, block = int(chunks.context_lens[nth]), int(chunks.block_tables[nth, 0])
            attended[start:end] = query[start:end] * length + (block + layer)
        return attended


def chunks_of(first_row: int, lens: list[int], context_lens: list[int]) -> PagedRows:
    num_blocks = -(-max(context_lens) // BLOCK_SIZE)
    starts = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    tables = torch.arange(10, 10 + len(lens))[:, None].expand(-1, num_blocks)
    rows = slice(first_row, first_row + sum(lens))
    return PagedRows(rows, tables, torch.tensor(context_lens), starts, tuple(lens))


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    query = torch.arange(NUM_ROWS * 2.0).view(NUM_ROWS, 1, 2)
    return query, torch.full_like(query, -1.0)


@pytest.fixture
def graphs(tensors: tuple[torch.Tensor, torch.Tensor]) -> PromptAttentionGraphs:
    graphs = PromptAttentionGraphs(ScaledQueries(), Recompute(), *tensors)
    for size in (64, 16):
        graphs.record(size, NUM_LAYERS)
    return graphs


@pytest.mark.parametrize(("first_row", "lens"), [(0, [16]), (3, [5, 7, 1]), (40, [20]), (1, [1])])
def test_rows_of_prompts_alone_change(
    graphs: PromptAttentionGraphs,
    tensors: tuple[torch.Tensor, torch.Tensor],
    first_row: int,
    lens: list[int],
) -> None:
    query, attended = tensors
    earlier = graphs.place(chunks_of(0, [9, 9, 9, 9], [9, 20, 30, 700]))
    assert earlier is not None
    attended.fill_(-1.0)

    replays = graphs.place(chunks_of(first_row, lens, [100 + each for each in lens]))

    assert replays is not None
    assert len(replays) == NUM_LAYERS
    for layer, replay in enumerate(replays):
        replay()
        expected, row = torch.full_like(attended, -1.0), first_row
        for nth, length in enumerate(lens):
            rows = slice(row, row + length)
            expected[rows] = query[rows] * (100 + length) + (10 + nth + layer)
            row += length
        torch.testing.assert_close(attended, expected)


def test_what_does_not_fit_is_left_to_others(graphs: PromptAttentionGraphs) -> None:
    assert graphs.place(None) is None
    assert graphs.place(chunks_of(0, [2] * MOST_PROMPTS, [9] * MOST_PROMPTS)) is not None
    assert graphs.place(chunks_of(0, [2] * (MOST_PROMPTS + 1), [9] * (MOST_PROMPTS + 1))) is None
    assert graphs.place(chunks_of(0, [2], [MOST_TOKENS])) is not None
    assert graphs.place(chunks_of(0, [2], [MOST_TOKENS + 1])) is None
    assert graphs.place(chunks_of(0, [64], [64])) is not None
    assert graphs.place(chunks_of(1, [64], [64])) is None


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(32, [32]), (256, [256]), (384, [384, 256]), (1024, [1024, 512, 256])],
)
def test_sizes_from_the_largest_down(most: int, sizes: list[int]) -> None:
    assert prompt_sizes(most) == sizes
