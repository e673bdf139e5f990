from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.checked_interpreter import assert_equals_reference, checked
from kernels.errors import ContractError, DeviceAssertion, Uninitialised
from kernels.paged_prefill import reference
from kernels.paged_prefill.api import paged_prefill
from tests.kernels.contexts import normal, paged
from tests.kernels.launches import assert_bundled
from tests.kernels.paged_chunks import chunks, starts_of
from tests.kernels.tolerances import ATTENTION, DTYPES, ROUNDINGS

LAYOUTS = {
    "one token": ([1], [1]),
    "whole prompts": ([64, 65, 1], [64, 65, 1]),
    "a chunk that ends a block": ([63], [128]),
    "a chunk that begins one": ([3], [67]),
    "long and short": ([70, 2, 7], [200, 3, 130]),
    "an empty chunk": ([3, 0, 2], [5, 9, 2]),
    "no chunks": ([], []),
}


def assert_equals(arguments: tuple[object, ...], dtype: torch.dtype = torch.float32) -> None:
    assert_equals_reference(
        paged_prefill,
        reference.paged_prefill,
        *arguments,
        rtol=ROUNDINGS[dtype],
        atol=ATTENTION[dtype],
    )


@pytest.mark.parametrize("window", [None, 1, 40, 64, 1000])
def test_the_specification_is_masked_attention(window: int | None) -> None:
    query_lens, context_lens = [5, 70, 1], [5, 150, 64]
    *caches, tables, lens = paged(context_lens, 2, 8)
    query = normal(sum(query_lens), 6, 8)

    attended = paged_prefill(query, starts_of(query_lens), *caches, tables, lens, 0.4, window)

    for rows, came, table, context_len in zip(
        query.split(query_lens), attended.split(query_lens), tables, context_lens, strict=True
    ):
        own = table[: -(-context_len // 64)]
        keys, values = (cache[own].flatten(0, 1)[:context_len] for cache in caches)
        is_seen = torch.ones(len(rows), context_len, dtype=torch.bool)
        is_seen = is_seen.tril(context_len - len(rows))
        if window is not None:
            is_seen = is_seen.triu(context_len - len(rows) - window + 1)
        wide = (each.double().transpose(0, 1) for each in (rows, keys, values))
        expected = F.scaled_dot_product_attention(*wide, is_seen, scale=0.4, enable_gqa=True)
        torch.testing.assert_close(came.double(), expected.transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_equals_its_reference(layout: str, dtype: torch.dtype) -> None:
    assert_equals(chunks(*LAYOUTS[layout], dtype=dtype), dtype)


@pytest.mark.parametrize("window", [1, 3, 63, 64, 65, 1000])
def test_windows(window: int) -> None:
    assert_equals(chunks([70, 5], [150, 66], window=window))
    assert_equals(chunks([70], [150], dtype=torch.bfloat16, window=window), torch.bfloat16)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 2), (7, 1), (9, 3), (16, 1)])
def test_groups_of_any_size(heads: tuple[int, int]) -> None:
    assert_equals(chunks([9, 30], [70, 30], heads))


@pytest.mark.parametrize("head_dim", [1, 6, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_any_width(head_dim: int, dtype: torch.dtype) -> None:
    assert_equals(chunks([9], [70], (2, 1), head_dim, dtype), dtype)


@pytest.mark.parametrize("scale", [1e-30, 1e4])
def test_even_weights_and_all_weight_on_one_key(scale: float) -> None:
    assert_equals(chunks([9], [70], head_dim=64, scale=scale))


def test_a_fused_projection_is_read_through_its_strides() -> None:
    query, *others = chunks([5, 3], [70, 3], heads=(4, 2))
    fused = torch.full((8, 8, 16), float("nan"))
    fused[:, 1:5] = query
    assert_equals((fused[:, 1:5], *others))


def product_by_rows(
    left: np.ndarray[Any, Any], right: np.ndarray[Any, Any], dtype: Any
) -> np.ndarray[Any, Any]:
    """What BLAS makes of a row depends on where it lies; tensor cores do not look."""
    return np.stack([row @ right for row in left]).astype(dtype)


@pytest.mark.parametrize("runs_kernel", [True, False])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_and_company_do_not_change_a_bit(
    dtype: torch.dtype, window: int | None, runs_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np, "matmul", product_by_rows)
    *caches, tables, _ = paged([150, 20], 2, 16, dtype=dtype, num_spare=200)
    query = normal(150, 6, 16, dtype=dtype)

    def attend(query_lens: list[int], ends: list[int], which: list[int]) -> torch.Tensor:
        rows = [query[end - length : end] for length, end in zip(query_lens, ends, strict=True)]
        arguments = (torch.cat(rows), starts_of(query_lens), *caches, tables[which])
        with checked() if runs_kernel else nullcontext():
            return paged_prefill(*arguments, torch.tensor(ends), 0.3, window, deterministic=True)

    whole = attend([150], [150], [0])
    parts = [attend([n, 20], [end, 20], [0, 1])[:n] for n, end in ((61, 61), (64, 125), (25, 150))]

    assert torch.equal(torch.cat(parts), whole)


def test_the_longest_chunk_may_be_given_too_long_and_not_too_short() -> None:
    *arguments, _ = chunks([100, 3], [100, 70], heads=(8, 2))
    assert_equals((*arguments, 300))
    assert_equals((*arguments, None))
    with checked(), pytest.raises(DeviceAssertion, match="longer than max_query_len"):
        paged_prefill(*arguments, 3)


def test_a_block_beyond_the_cache_is_an_assertion() -> None:
    *arguments, tables, lens, scale, window, longest = chunks([2], [70])
    tables[0, 1] = 3
    with checked(), pytest.raises(DeviceAssertion, match="a block beyond the cache"):
        paged_prefill(*arguments, tables, lens, scale, window, longest)


def test_a_chunk_beyond_its_context_is_an_assertion() -> None:
    arguments = chunks([3], [2])
    with checked(), pytest.raises(DeviceAssertion, match="a chunk beyond its context"):
        paged_prefill(*arguments)


def test_rows_of_no_chunk_are_found() -> None:
    query, *others = chunks([3], [3])
    with checked(), pytest.raises(Uninitialised, match="of out were never stored"):
        paged_prefill(torch.cat((query, query)), *others)


def changed(place: int, value: object) -> tuple[object, ...]:
    arguments = list(chunks([3], [70]))
    arguments[place] = value
    return tuple(arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (changed(1, torch.tensor([0, 3])), "query_starts must be int32, came int64"),
        (changed(2, torch.zeros(4, 16, 2, 16)), r"key_cache must be \[blocks 64 kv_heads size\]"),
        (changed(3, torch.zeros(1, 64, 2, 16)), "value_cache must be .* where blocks = 3"),
        (changed(4, torch.zeros(1, 2).int()), "block_tables must be int64, came int32"),
        (changed(6, 0.0), "scale must be from"),
        (changed(7, -1), "window must be from 1"),
        (chunks([3], [70], head_dim=257), "size must be at most 256, came 257"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[object, ...], says: str) -> None:
    with checked(), pytest.raises(ContractError, match=says):
        paged_prefill(*arguments)


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
@pytest.mark.parametrize("window", [None, 7])
def test_the_bundle_has_what_is_launched(head_dim: int, window: int | None) -> None:
    arguments = chunks([3], [70], head_dim=head_dim, dtype=torch.bfloat16, window=window)
    assert_bundled(lambda: paged_prefill(*arguments))
