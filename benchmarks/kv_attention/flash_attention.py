"""FlashAttention 3 over the same lengths in bfloat16, in the pages that serve it best."""

from collections.abc import Sequence

import torch

from benchmarks.command import Progress
from benchmarks.errors import MeasurementFailed
from benchmarks.kernels.flash_attention import flash_attn_varlen_func
from benchmarks.kernels.timing import graph_us
from benchmarks.kv_attention.contexts import NUM_HEADS, NUM_KV_HEADS, SIZE
from kernels.launch import cdiv

PAGES = (16, 64)


def flash_attention_us(lengths: Sequence[int], min_bytes: int, progress: Progress) -> float:
    """Raises MeasurementFailed."""
    times_us = {page: _paged_us(lengths, min_bytes, page) for page in PAGES}
    progress(f"FlashAttention 3, {len(lengths)} x {lengths[0]}, us by tokens a page: {times_us}")
    return min(times_us.values())


def _paged_us(lengths: Sequence[int], min_bytes: int, page: int) -> float:
    batch, width = len(lengths), cdiv(max(lengths), page)
    set_bytes = batch * width * page * 2 * NUM_KV_HEADS * SIZE * 2
    num_sets = max(2, cdiv(min_bytes, set_bytes))
    shape = (num_sets * batch * width, page, NUM_KV_HEADS, SIZE)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    tables = torch.randperm(shape[0], device="cuda", dtype=torch.int32)
    tables = tables.view(num_sets, batch, width)
    query = torch.randn(batch, NUM_HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    seen = torch.tensor(lengths, dtype=torch.int32, device="cuda")

    def call(index: int) -> torch.Tensor:
        return flash_attn_varlen_func(
            q=query,
            k=caches[0],
            v=caches[1],
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=max(lengths),
            seqused_k=seen,
            block_table=tables[index % num_sets],
            softmax_scale=SIZE**-0.5,
            causal=True,
            fa_version=3,
        )

    try:
        return graph_us(call)
    except RuntimeError as exc:
        raise MeasurementFailed(f"FlashAttention 3 of {batch} sequences: {exc}") from exc
