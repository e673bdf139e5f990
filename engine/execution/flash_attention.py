"""Chunks of prompts by FlashAttention 3, as vllm carries it; single tokens, and short prompts where
their attention is recorded, by our own kernels.

On an H200 it takes 1.00 (32 x 8K) to 1.06 (1 x 128K) of our kernel's time for decodes, by
benchmarks/results/engine-exact-h200.json. Of a prompt of 8K ours makes 495 TFLOP/s
(kernels-h200.json), FlashAttention 3 some 670 on the same kind of GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch

from engine.errors import EngineError
from engine.execution.kv_tensors import KVTensors
from engine.execution.triton_attention import PagedRows, TritonAttention
from kernels.launch import cdiv, num_sms

MODULE = "vllm.vllm_flash_attn"
VERSION = 3
TILE_ROWS = 128  # rows of a tile: query heads of one KV head, times tokens
NUM_SMS_WITHOUT_A_GPU = 132
LEAST_SPLIT_TOKENS = 1024  # of a context, below which a merge costs more than it brings
DTYPES = (torch.bfloat16, torch.float16)


class VllmFlashAttention(TritonAttention):
    """What is to be deterministic, and float32, goes through our kernels altogether."""

    def __init__(
        self,
        kv: KVTensors,
        windows: Iterable[int | None],
        scale: float,
        *,
        deterministic: bool = False,
    ) -> None:
        """As `TritonAttention`. Raises EngineError also where FlashAttention 3 is not to be had."""
        super().__init__(kv, windows, scale, deterministic=deterministic)
        self._flash: Callable[..., torch.Tensor] | None = None
        if kv.dtype in DTYPES and not deterministic:
            module, reason = find_flash_attention()
            if module is None:
                raise EngineError(
                    f"attention_backend vllm_flash_attn needs {MODULE} with FlashAttention "
                    f"{VERSION}: {reason}; install vllm for this torch and GPU, or choose "
                    "attention_backend triton"
                )
            self._flash = module.flash_attn_varlen_func
            self._num_sms = num_sms(kv.device, NUM_SMS_WITHOUT_A_GPU)

    def place_chunks(self, chunks: PagedRows) -> PagedRows:
        if self._flash is None:
            return chunks
        tables, lens = chunks.block_tables.int(), chunks.context_lens.int()
        return replace(chunks, block_tables=tables, context_lens=lens)

    def attend_chunks(self, layer: int, query: torch.Tensor, chunks: PagedRows) -> torch.Tensor:
        if self._flash is None:
            return super().attend_chunks(layer, query, chunks)
        window = self._windows[layer]
        max_context_len = chunks.block_tables.shape[1] * self._kv.block_size
        heads = query.shape[1], self._kv.block_shape[-2]
        return self._flash(
            q=query[chunks.rows],
            k=self._kv.keys[layer],
            v=self._kv.values[layer],
            max_seqlen_q=max(chunks.query_lens),
            cu_seqlens_q=chunks.query_starts,
            max_seqlen_k=max_context_len,
            seqused_k=chunks.context_lens,
            block_table=chunks.block_tables,
            softmax_scale=self._scale,
            causal=True,
            window_size=None if window is None else [window - 1, 0],
            num_splits=num_splits(chunks.query_lens, *heads, max_context_len, self._num_sms),
            fa_version=VERSION,
        )


@lru_cache(maxsize=1)  # all layers of a step ask the same
def num_splits(
    query_lens: tuple[int, ...],
    num_heads: int,
    num_kv_heads: int,
    max_context_len: int,
    num_sms: int,
) -> int:
    """Into how many parts a context is cut at most: as many as run at once beside each other. One
    wave, for one and a little takes the time of two: of 384 tokens of a Llama 3.1 8B at 64K, 96
    tiles on 132 SMs, an H200 makes 505 TFLOP/s whole and 429 as FlashAttention cuts them itself.
    """
    group = num_heads // num_kv_heads
    num_tiles = num_kv_heads * sum(cdiv(group * each, TILE_ROWS) for each in query_lens)
    return max(1, min(num_sms // num_tiles, max_context_len // LEAST_SPLIT_TOKENS))


@cache
def find_flash_attention() -> tuple[Any, str]:
    """The module, or None and why not."""
    try:
        module = import_module(MODULE)
        if not module.is_fa_version_supported(VERSION):
            return None, str(module.fa_version_unsupported_reason(VERSION))
    except (ImportError, AttributeError, OSError, RuntimeError) as exc:
        return None, f"{type(exc).__name__}: {exc}"
    return module, ""
