from functools import partial
from typing import Any

import pytest
import torch

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError, DeviceAssertion
from kernels.launch import cdiv
from kernels.paged_decode import reference
from kernels.paged_decode.api import paged_decode, paged_decode_lse
from kernels.paged_decode.splits import FIXED_MOST, Splits, fitting_splits, fixed_splits
from tests.kernels.contexts import BLOCK_SIZE, expected_by_hand, normal, paged
from tests.kernels.launches import assert_bundled, launches_of
from tests.kernels.tolerances import DTYPES, ROUNDINGS

# Of values of unit size: probabilities are rounded to the dtype.
ATOL = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _scratch_is_poisoned():
    """What a split did not store is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_right(*arguments: Any, op: Any = paged_decode_lse, dtype: torch.dtype = torch.float32):
    assert_equals_reference(
        op,
        reference.paged_decode_lse,
        *arguments,
        rtol=ROUNDINGS[dtype],
        atol=ATOL[dtype],
    )


@pytest.mark.parametrize("window", [None, 1, 70])
def test_the_reference_is_attention_by_hand(window: int | None) -> None:
    query, contexts = normal(3, 6, 16), paged([1, 64, 130], 2, 16)
    attended = paged_decode(query, *contexts, 0.3, window)

    for row, context_len in enumerate([1, 64, 130]):
        expected = expected_by_hand(
            query[row], contexts[:2], contexts[2][row], context_len, 0.3, window
        )
        torch.testing.assert_close(attended[row].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context_len", [1, 31, 32, 63, 64, 65, 200])
def test_the_kernel_equals_its_reference(context_len: int, dtype: torch.dtype) -> None:
    query = normal(1, 4, 64, dtype=dtype)
    assert_right(query, *paged([context_len], 2, 64, dtype=dtype), 0.125, dtype=dtype)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(1, 1), (3, 1), (8, 2), (7, 1), (16, 2), (16, 1), (17, 1), (32, 1), (3, 3)],
)
def test_groups_of_heads(num_heads: int, num_kv_heads: int) -> None:
    query = normal(2, num_heads, 16)
    assert_right(query, *paged([70, 5], num_kv_heads, 16), 0.3)


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 240, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_of_a_head(head_dim: int, dtype: torch.dtype) -> None:
    query = normal(1, 2, head_dim, dtype=dtype)
    contexts = paged([40], 1, head_dim, dtype=dtype)
    assert_right(query, *contexts, head_dim**-0.5, dtype=dtype)


@pytest.mark.parametrize("deterministic", [False, True])
def test_lengths_of_a_batch_and_padding(deterministic: bool) -> None:
    lengths = [200, 0, 1, 129, 0, 64]
    op = partial(paged_decode_lse, deterministic=deterministic)
    assert_right(normal(6, 4, 32), *paged(lengths, 2, 32), 0.2, op=op)


def test_a_context_of_none_is_zero_whatever_the_cache_holds() -> None:
    caches = [torch.full((1, BLOCK_SIZE, 1, 16), float("nan")) for _ in "kv"]
    tables, lengths = torch.full((2, 1), -1), torch.zeros(2, dtype=torch.int64)
    with checked():
        out, lse = paged_decode_lse(normal(2, 2, 16), *caches, tables, lengths, 1.0)

    assert out.eq(0).all()
    assert lse.eq(float("-inf")).all()


def test_tables_without_an_entry_and_batches_without_a_row() -> None:
    caches = [torch.zeros(1, BLOCK_SIZE, 1, 16) for _ in "kv"]
    none, lengths = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)

    assert_right(normal(2, 2, 16), *caches, none, lengths, 1.0)
    assert_right(normal(0, 2, 16), *caches, none[:0], lengths[:0], 1.0)


def test_sequences_that_share_blocks() -> None:
    *caches, tables, lengths = paged([100, 128], 1, 16)
    tables[0, :2] = tables[1, :2]
    assert_right(normal(2, 2, 16), *caches, tables, lengths, 0.3)


@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 100, 199, 200, 5000])
def test_windows(window: int) -> None:
    query, contexts = normal(2, 2, 16), paged([200, 40], 1, 16)
    assert_right(query, *contexts, 0.3, window)


def test_what_lies_before_the_window_is_not_read() -> None:
    key_cache, value_cache, tables, lengths = paged([200], 1, 16)
    query = normal(1, 2, 16)
    expected = reference.paged_decode(query, key_cache, value_cache, tables, lengths, 0.3, 70)
    key_cache[tables[0, 2], :2] = value_cache[tables[0, 2], :2] = float("nan")  # tokens 128, 129
    tables[0, :2] = -1

    with checked():
        attended = paged_decode(query, key_cache, value_cache, tables, lengths, 0.3, 70)

    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 40])
def test_splits_merge_to_the_same(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.paged_decode.api.fitting_splits", lambda *_: Splits(most, most, 1))
    assert_right(normal(2, 2, 16), *paged([330, 33], 1, 16), 0.3)
    assert_right(normal(2, 2, 16), *paged([200, 33], 1, 16), 0.3, 75)


def test_many_splits_merge_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.paged_decode.api.fitting_splits", lambda *_: Splits(40, 40, 1))
    meta = {"COLUMNS": 16, "SPLITS": 4, "num_warps": 1}
    monkeypatch.setattr(reference, "MERGE_META_OF_MANY", meta)
    assert_right(normal(1, 2, 48), *paged([330], 1, 48), 0.3)


def test_scores_far_apart_do_not_overflow() -> None:
    key_cache, *others = paged([200], 1, 16)
    assert_right(200 * normal(1, 2, 16), 3 * key_cache, *others, 1.0)


def test_a_fused_projection_is_read_through_its_strides() -> None:
    query = normal(2, 8, 16)[:, 2:6]
    assert_right(query, *paged([70, 65], 2, 16), 0.3)


def test_nan_within_a_context_stays_in_its_row_and_kv_head() -> None:
    query, contexts = normal(2, 4, 16), paged([70, 65], 2, 16)
    contexts[1][contexts[2][0, 1], 3, 1, 5] = float("nan")  # a value: sequence 0, head 1

    with checked():
        attended = paged_decode(query, *contexts, 0.3)

    is_nan = attended.isnan().nonzero()
    assert is_nan.tolist() == [[0, 2, 5], [0, 3, 5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_a_batch_where_that_is_asked(dtype: torch.dtype) -> None:
    lengths = [320, 1, 700, 65]
    query, (*caches, tables, context_lens) = (
        normal(4, 2, 16, dtype=dtype),
        paged(lengths, 1, 16, dtype=dtype),
    )
    op = partial(paged_decode_lse, deterministic=True)
    with checked():
        together = op(query, *caches, tables, context_lens, 0.3)
        for row, context_len in enumerate(lengths):
            one = slice(row, row + 1)
            table = tables[one, : -(-context_len // BLOCK_SIZE)].contiguous()
            alone = op(query[one], *caches, table, context_lens[one], 0.3)
            assert torch.equal(alone[0], together[0][one])
            assert torch.equal(alone[1], together[1][one])


@pytest.mark.parametrize(("num_rows", "is_merged"), [(170, False), (2, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_that_nobody_cuts_are_not_merged(
    num_rows: int, is_merged: bool, dtype: torch.dtype
) -> None:
    """170 sequences of 2 KV heads are more than what runs at once."""
    lengths = [150, 0, 64, 1, 200] * (num_rows // 5) or [150, 200]
    contexts = paged(lengths, 2, 16, dtype=dtype)
    query = normal(num_rows, 4, 16, dtype=dtype)
    assert_right(query, *contexts, 0.3, 90, dtype=dtype)
    launches = launches_of(lambda: paged_decode(query, *contexts, 0.3))
    names = [launcher.contract.kernel for launcher, _ in launches]
    assert names == ["paged_decode", *["paged_decode_merge"] * is_merged]


def test_a_greatest_context_that_is_known_saves_splits_and_changes_no_bit() -> None:
    query, contexts = normal(1, 2, 16), paged([300], 1, 16, num_spare=40)
    with checked():
        known = paged_decode(query, *contexts, 0.3, max_context_len=300, deterministic=True)
        assert torch.equal(known, paged_decode(query, *contexts, 0.3, deterministic=True))


def test_a_context_longer_than_the_greatest_is_noticed() -> None:
    query, contexts = normal(1, 2, 16), paged([300], 1, 16)
    with checked(), pytest.raises(DeviceAssertion, match="longer than the greatest"):
        paged_decode(query, *contexts, 0.3, max_context_len=256, deterministic=True)


def test_a_block_far_into_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its elements are beyond 2^31; what is not touched takes no memory."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    num_blocks = 2**31 // (BLOCK_SIZE * 128) + 1
    cache = torch.empty(num_blocks, BLOCK_SIZE, 1, 128, dtype=torch.float16)
    cache[-1] = near = normal(BLOCK_SIZE, 1, 128, dtype=torch.float16)
    query, lengths = normal(1, 2, 128, dtype=torch.float16), torch.tensor([40])

    with checked():
        far = paged_decode(query, cache, cache, torch.tensor([[num_blocks - 1]]), lengths, 0.1)
        same = paged_decode(query, near[None], near[None], torch.tensor([[0]]), lengths, 0.1)

    assert torch.equal(far, same)


@pytest.mark.parametrize("context_len", [-1, 129])
def test_a_context_that_its_table_does_not_hold_is_noticed(context_len: int) -> None:
    *contexts, _ = paged([128], 1, 16, num_spare=0)
    with checked(), pytest.raises(DeviceAssertion, match="longer than its block table"):
        paged_decode(normal(1, 1, 16), *contexts, torch.tensor([context_len]), 1.0)


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_beyond_the_cache_is_noticed(block: int) -> None:
    *caches, tables, lengths = paged([128], 1, 16)
    tables[0, 1] = block
    with checked(), pytest.raises(DeviceAssertion, match="a block beyond the cache"):
        paged_decode(normal(1, 1, 16), *caches, tables, lengths, 1.0)


def test_what_no_kernel_reads_is_refused() -> None:
    contexts = paged([64], 1, 16)
    with checked(), pytest.raises(ContractError, match="block_tables must be int64, came int32"):
        paged_decode(normal(1, 1, 16), *contexts[:2], contexts[2].int(), contexts[3], 1.0)
    with checked(), pytest.raises(ContractError, match=r"multiples of 16 elements.*size = 24"):
        paged_decode(normal(1, 1, 24), *paged([64], 1, 24), 1.0)
    with checked(), pytest.raises(ContractError, match="size must be at most 256, came 272"):
        paged_decode(normal(1, 1, 272), *paged([64], 1, 272), 1.0)
    caches = [each.view(-1, 8, 1, 16) for each in contexts[:2]]
    with checked(), pytest.raises(ContractError, match="blocks of a multiple of 16 tokens, came"):
        paged_decode(normal(1, 1, 16), *caches, *contexts[2:], 1.0)
    with pytest.raises(AssertionError, match="3"):
        paged_decode(normal(1, 3, 16), *paged([64], 2, 16), 1.0)


def test_one_wave_of_splits() -> None:
    assert fitting_splits(131072, 32, 8, 132 * 8) == Splits(132, 132, 2)
    assert fitting_splits(8192, 32, 32 * 8, 132 * 8) == Splits(4, 4, 2)
    assert fitting_splits(200, 32, 8, 132 * 8) == Splits(4, 4, 2)
    assert fitting_splits(8192, 32, 2000, 132 * 8) == Splits(1, 1, 2)
    assert fitting_splits(0, 64, 0, 132 * 8) == Splits(1, 1, 1)


def test_fixed_splits_know_nothing_of_the_batch() -> None:
    assert fixed_splits(131072, 32) == Splits(FIXED_MOST, FIXED_MOST, 8)
    assert fixed_splits(1024, 32) == Splits(4, FIXED_MOST, 8)
    assert fixed_splits(0, 32) == Splits(1, FIXED_MOST, 8)


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("window", [1, 33, 1000, reference.ALL_TOKENS])
def test_a_grid_has_every_split_of_any_context(window: int, tile: int) -> None:
    for greatest in range(0, 20000, 1711):
        seen = min(greatest, window + tile)
        for splits in (fixed_splits(seen, tile), fitting_splits(seen, tile, 24, 1056)):
            for context_len in range(greatest + 1):
                first = max(context_len - window, 0) // tile
                num_tiles = cdiv(context_len, tile) - first
                tiles = max(splits.min_tiles, cdiv(num_tiles, splits.most))
                assert cdiv(num_tiles, tiles) <= splits.count


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_every_launch_of_a_served_model_has_its_variant(head_dim: int) -> None:
    query = torch.zeros(2, 8, head_dim, dtype=torch.bfloat16)[:, 2:6]
    contexts = paged([70, 1], 2, head_dim, dtype=torch.bfloat16)

    assert_bundled(lambda: paged_decode(query, *contexts, 1.0))
    assert_bundled(lambda: paged_decode(query, *contexts, 1.0, 40, deterministic=True))
