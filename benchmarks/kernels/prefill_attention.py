"""Prefill attention at the size of an 8B Llama, of a fresh prompt and of chunks late in a long one:
bound by the tensor cores."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.kernels.attention import (
    BLOCK_SIZE,
    DTYPE,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    TOKEN_BYTES,
)
from benchmarks.kernels.case import Arguments, Case
from benchmarks.kernels.flash_attention import flash_attn_varlen_func
from benchmarks.kernels.tune import Knob, grid
from kernels.paged_prefill import reference
from kernels.paged_prefill.api import paged_prefill

# Tokens of the chunk, and of the context that it ends.
SHAPES = {
    "attn_prefill_8k": (8192, 8192),
    "attn_prefill_64_at_128k": (64, 131072),
    "attn_prefill_512_at_128k": (512, 131072),
}
PREFILL_KNOBS = {
    "attn_prefill_8k": Knob(
        "kernels.paged_prefill.reference",
        "METAS",
        grid(ROWS=(64, 128), BLOCK=(128,), TOKENS=(32, 64), num_warps=(4, 8), num_stages=(2, 3, 4)),
    )
}


def prefill_cases() -> Iterator[Case]:
    for name, (num_tokens, context_len) in SHAPES.items():
        yield Case(
            name,
            f"{num_tokens} tokens, the last of {context_len}, causal, {NUM_HEADS} heads of "
            f"{NUM_KV_HEADS} x {HEAD_DIM}, blocks of {BLOCK_SIZE}, bfloat16",
            paged_prefill,
            _gathered,
            partial(_chunk, num_tokens, context_len),
            num_bytes=context_len * TOKEN_BYTES
            + 2 * num_tokens * NUM_HEADS * HEAD_DIM * DTYPE.itemsize,
            rtol=2 * torch.finfo(DTYPE).eps,
            atol=torch.finfo(DTYPE).eps,
            is_large=False,
            reference=reference.paged_prefill,
            peers={"torch.sdpa, contiguous": _contiguous, "vllm": _flash_attention_3},
        )


def _chunk(num_tokens: int, context_len: int) -> Arguments:
    num_blocks = context_len // BLOCK_SIZE
    shape = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    caches = [torch.randn(shape, device="cuda", dtype=DTYPE) for _ in "kv"]
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    table = torch.randperm(num_blocks, device="cuda")[None]
    lengths = torch.tensor([context_len], device="cuda")
    query = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    return query, starts, *caches, table, lengths, HEAD_DIM**-0.5


def _gathered(
    query: torch.Tensor,
    query_starts: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _attended(query, key_cache[block_tables[0]], value_cache[block_tables[0]], scale)


def _contiguous(
    query: torch.Tensor,
    query_starts: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *others: Any,
) -> torch.Tensor:
    """The same bytes without a block table, as if the blocks followed each other."""
    return _attended(query, key_cache, value_cache, others[-1])


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    heads = (
        each[None].transpose(1, 2) for each in (query, keys.flatten(0, 1), values.flatten(0, 1))
    )
    num_tokens, context_len = len(query), keys.shape[0] * BLOCK_SIZE
    is_whole = num_tokens == context_len
    # torch.compile does not take this mask, so that its row of a chunk stays empty.
    mask = None if is_whole else causal_lower_right(num_tokens, context_len)
    attended = F.scaled_dot_product_attention(
        *heads, mask, is_causal=is_whole, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _flash_attention_3(
    query: torch.Tensor,
    query_starts: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return flash_attn_varlen_func(
        q=query,
        k=key_cache,
        v=value_cache,
        max_seqlen_q=len(query),
        cu_seqlens_q=query_starts,
        max_seqlen_k=block_tables.shape[1] * BLOCK_SIZE,
        seqused_k=context_lens.int(),
        block_table=block_tables.int(),
        softmax_scale=scale,
        causal=True,
        fa_version=3,
    )
