"""Programs that share the keys of a tile of rows, and the merge of what each of them made."""

from functools import partial
from typing import Any

import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import Uninitialised
from kernels.paged_prefill import reference
from kernels.paged_prefill.api import paged_prefill
from kernels.paged_prefill.splits import MAX_WAVES, MIN_TOKENS, fitting_splits
from tests.kernels.launches import assert_bundled, launches_of
from tests.kernels.paged_chunks import chunks
from tests.kernels.tolerances import ATTENTION, DTYPES, ROUNDINGS

GPU_PROGRAMS = 264  # of an H200
SPLIT = ["paged_prefill_split", "paged_prefill_merge"]


@pytest.fixture
def split_into(monkeypatch: pytest.MonkeyPatch) -> Any:
    def split(splits: int) -> None:
        monkeypatch.setattr("kernels.paged_prefill.api.fitting_splits", lambda *_: splits)

    return split


def assert_equals(arguments: tuple[object, ...], dtype: torch.dtype = torch.float32) -> None:
    assert_equals_reference(
        paged_prefill,
        reference.paged_prefill,
        *arguments,
        rtol=ROUNDINGS[dtype],
        atol=ATTENTION[dtype],
    )


def launched(arguments: tuple[object, ...], **named: bool) -> list[str]:
    call = partial(paged_prefill, *arguments, **named)
    return [launcher.contract.kernel for launcher, _ in launches_of(call)]


def with_longer_tables(arguments: tuple[object, ...], max_blocks: int) -> tuple[object, ...]:
    """As if the contexts could be that long; the entries that are new are no blocks."""
    *before, tables, lens, scale, window, longest = arguments
    assert isinstance(tables, torch.Tensor)
    wide = torch.full((len(tables), max_blocks), 2**40)
    wide[:, : tables.shape[1]] = tables
    return *before, wide, lens, scale, window, longest


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_merge_to_the_same(splits: int, dtype: torch.dtype, split_into: Any) -> None:
    split_into(splits)
    assert_equals(chunks([17, 1, 65], [300, 64, 129], (2, 1), dtype=dtype), dtype)


@pytest.mark.parametrize(
    ("query_len", "context_len"),
    [(1, 65), (1, 1000), (17, 64), (17, 1000), (64, 64), (64, 192), (65, 65), (65, 300)],
)
def test_odd_chunks(query_len: int, context_len: int, split_into: Any) -> None:
    split_into(3)
    assert_equals(chunks([query_len], [context_len], (2, 1)))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 1), (8, 1), (9, 3)])
def test_groups_of_any_size(heads: tuple[int, int], split_into: Any) -> None:
    split_into(4)
    assert_equals(chunks([9, 17], [200, 17], heads))


@pytest.mark.parametrize(("window", "splits"), [(1, 2), (63, 5), (64, 2), (65, 3), (1000, 5)])
def test_windows(window: int, splits: int, split_into: Any) -> None:
    split_into(splits)
    assert_equals(chunks([40, 5], [230, 66], window=window))
    assert_equals(chunks([40], [330], dtype=torch.bfloat16, window=window), torch.bfloat16)


def test_what_lies_before_the_window_is_not_looked_up(split_into: Any) -> None:
    split_into(3)
    arguments = chunks([5], [330], window=70)
    tables = arguments[4]
    assert isinstance(tables, torch.Tensor)
    expected = reference.paged_prefill(*arguments)
    tables[0, :3] = 2**40
    with checked():
        attended = paged_prefill(*arguments)
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [([1], [1]), ([5], [40]), ([3, 0, 2], [5, 9, 2]), ([0], [0]), ([], [])],
)
def test_more_splits_than_tiles(
    query_lens: list[int], context_lens: list[int], split_into: Any
) -> None:
    """Most of them see nothing, and no entry of a table after a context is looked up."""
    split_into(40)
    assert_equals(chunks(query_lens, context_lens))


@pytest.mark.parametrize("head_dim", [1, 63, 96, 128, 256])
def test_heads_of_any_width(head_dim: int, split_into: Any) -> None:
    split_into(3)
    for dtype in (torch.float32, torch.bfloat16):
        assert_equals(chunks([3], [100], (2, 1), head_dim, dtype, head_dim**-0.5), dtype)


@pytest.mark.parametrize("per_step", [1, 4])
def test_a_merge_in_steps_of_which_the_first_may_see_nothing(
    per_step: int, split_into: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = {"COLUMNS": 16, "SPLITS": per_step, "num_warps": 1}
    monkeypatch.setattr(reference, "MERGE_META", meta)
    split_into(7)
    assert_equals(chunks([20], [330], (1, 1), 24))
    assert_equals(chunks([32], [330], (1, 1), 24, window=1))


@pytest.mark.parametrize("scale", [1e-30, 1e4])
def test_even_weights_and_all_weight_on_one_key(scale: float, split_into: Any) -> None:
    split_into(4)
    assert_equals(chunks([5], [140], head_dim=64, scale=scale))


def test_a_fused_projection_is_read_through_its_strides(split_into: Any) -> None:
    split_into(3)
    query, *others = chunks([5, 3], [170, 3], heads=(4, 2))
    fused = torch.full((8, 8, 16), float("nan"))
    fused[:, 1:5] = query
    assert_equals((fused[:, 1:5], *others))


@pytest.mark.parametrize("token", [3, 140])
def test_nan_within_a_context_is_not_lost_in_a_merge(token: int, split_into: Any) -> None:
    split_into(3)
    arguments = chunks([9], [150])
    key_cache, tables = arguments[2], arguments[4]
    assert isinstance(key_cache, torch.Tensor)
    assert isinstance(tables, torch.Tensor)
    key_cache[tables[0, token // 64], token % 64, 1] = float("nan")
    assert_equals(arguments)


def test_rows_of_no_chunk_are_found(split_into: Any) -> None:
    split_into(2)
    query, *others = chunks([3], [3])
    with checked(), pytest.raises(Uninitialised, match="of partial were never stored"):
        paged_prefill(torch.cat((query, query)), *others)


def test_few_rows_of_a_long_context_are_split_and_others_are_not() -> None:
    few = chunks([9], [70])
    many = chunks([400], [400], (8, 8))
    for arguments in (few, many):
        assert launched(arguments) == ["paged_prefill"]
    assert launched(with_longer_tables(few, 64)) == SPLIT
    assert launched(with_longer_tables(few, 64), deterministic=True) == ["paged_prefill"]
    assert launched(with_longer_tables(many, 64)) == ["paged_prefill"]
    assert launched(with_longer_tables(chunks([9], [70], window=300), 64)) == ["paged_prefill"]


def test_short_chunks_beside_a_long_one_do_not_count_as_if_they_were_long() -> None:
    arguments = chunks([100, *[2] * 12], [100, *[2] * 12], (4, 2))
    assert launched(with_longer_tables(arguments, 64)) == SPLIT


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_the_bundle_has_what_is_launched_without_a_window(head_dim: int) -> None:
    arguments = chunks([3], [70], head_dim=head_dim, dtype=torch.bfloat16)
    arguments = with_longer_tables(arguments, 64)
    assert launched(arguments) == SPLIT
    assert_bundled(lambda: paged_prefill(*arguments))


@pytest.mark.parametrize(
    ("num_programs", "splits"),
    [(32, 8), (64, 4), (128, 2), (136, 3), (211, 1), (212, 1), (264, 1), (5000, 1), (0, 1)],
)
def test_splits_fill_the_gpu_and_what_fills_it_is_not_split(num_programs: int, splits: int) -> None:
    assert fitting_splits(2**17, num_programs, GPU_PROGRAMS) == splits


@pytest.mark.parametrize("max_tokens", [0, 1, 2047, 2048, 5000, 2**17, 2**20])
def test_splits_are_neither_short_nor_without_bound(max_tokens: int) -> None:
    for num_programs in range(1, 300):
        splits = fitting_splits(max_tokens, num_programs, GPU_PROGRAMS)
        assert splits >= 1
        assert splits == 1 or splits * MIN_TOKENS <= max_tokens
        assert splits == 1 or splits * num_programs <= MAX_WAVES * GPU_PROGRAMS
