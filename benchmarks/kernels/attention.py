"""Decode attention at the sizes of an 8B Llama: all pages full and scattered, a cold L2."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels.case import Arguments, Case
from benchmarks.kernels.flash_attention import flash_attn_varlen_func
from benchmarks.kernels.tune import Knob, grid
from kernels.paged_decode import reference
from kernels.paged_decode.api import paged_decode

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 64
DTYPE = torch.bfloat16
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
# Nine tenths of the speed of FlashAttention 3, measured on an H200.
BARS_US = {(32, 8192): 258 / 0.9, (1, 131072): 138 / 0.9, (8, 8192): 80.9 / 0.9}
FORMS = grid(
    BLOCK=(128,),
    TILE=(16, 32, 64),
    num_warps=(1, 2, 4),
    num_stages=(3, 5, 7),
    programs_per_sm=(4, 8, 12),
)
ATTENTION_KNOBS = {
    "attn_b32_8k": Knob("kernels.paged_decode.reference", "METAS", FORMS),
    "attn_b1_128k": Knob("kernels.paged_decode.reference", "METAS", FORMS),
    "attn_b8_8k": Knob(
        "kernels.paged_decode.reference",
        "MERGE_META_OF_MANY",
        grid(COLUMNS=(32, 64, 128), SPLITS=(16, 32, 64), num_warps=(1, 2, 4)),
    ),
}


def attention_cases() -> Iterator[Case]:
    for (batch, context_len), bar_us in BARS_US.items():
        yield Case(
            f"attn_b{batch}_{context_len // 1024}k",
            f"{batch} x {context_len} tokens, {NUM_HEADS} heads of {NUM_KV_HEADS} x {HEAD_DIM}, "
            f"blocks of {BLOCK_SIZE}, bfloat16",
            paged_decode,
            _gathered,
            lambda batch=batch, context_len=context_len: _contexts(batch, context_len),
            num_bytes=batch * (context_len * TOKEN_BYTES + 2 * NUM_HEADS * HEAD_DIM * 2),
            rtol=2 * torch.finfo(DTYPE).eps,
            atol=2**-12,
            bar_us=bar_us,
            reference=reference.paged_decode,
            peers={"torch.sdpa, contiguous": _contiguous, "vllm": _flash_attention_3},
        )


def _contexts(batch: int, context_len: int) -> Arguments:
    max_blocks = context_len // BLOCK_SIZE
    shape = (batch * max_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    caches = [torch.randn(shape, device="cuda", dtype=DTYPE) for _ in "kv"]
    tables = torch.randperm(batch * max_blocks, device="cuda").view(batch, max_blocks)
    lengths = torch.full((batch,), context_len, device="cuda")
    query = torch.randn(batch, NUM_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    return query, *caches, tables, lengths, HEAD_DIM**-0.5


def _gathered(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _attended(query, key_cache[block_tables], value_cache[block_tables], scale)


def _contiguous(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *others: Any
) -> torch.Tensor:
    """The same bytes without a block table, as if each sequence's blocks followed each other."""
    keys, values = (each.unflatten(0, (len(query), -1)) for each in (key_cache, value_cache))
    return _attended(query, keys, values, others[-1])


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """keys, values [num_sequences, num_blocks, block_size, num_kv_heads, head_dim]."""
    grouped = query.unflatten(1, (NUM_KV_HEADS, -1))
    keys, values = (each.flatten(1, 2).transpose(1, 2) for each in (keys, values))
    return F.scaled_dot_product_attention(grouped, keys, values, scale=scale).flatten(1, 2)


def _flash_attention_3(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    batch = len(query)
    return flash_attn_varlen_func(
        q=query,
        k=key_cache,
        v=value_cache,
        max_seqlen_q=1,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=query.device),
        max_seqlen_k=block_tables.shape[1] * BLOCK_SIZE,
        seqused_k=context_lens.int(),
        block_table=block_tables.int(),
        softmax_scale=scale,
        causal=True,
        fa_version=3,
    )
