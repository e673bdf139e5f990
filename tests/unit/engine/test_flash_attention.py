"""FlashAttention 3 behind the attention protocol, with a fake of its function that computes the
reference of our own kernel, and refuses what the real one would."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.execution.backends import attention_backend
from engine.execution.flash_attention import (
    MODULE,
    VllmFlashAttention,
    find_flash_attention,
    num_splits,
)
from engine.execution.inputs import build_inputs
from engine.execution.kv_tensors import KVTensors
from engine.execution.triton_attention import TritonAttention
from kernels.paged_prefill import reference
from tests.unit.engine.hand_batch import new_sequence, plan

WINDOWS = (None, 3, 30)


def fake_flash_attention(calls: list[int], is_supported: bool = True) -> ModuleType:
    def flash_attn_varlen_func(
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        seqused_k: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: list[int] | None,
        num_splits: int,
        fa_version: int,
    ) -> torch.Tensor:
        assert (causal, fa_version) == (True, 3)
        assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
        assert {cu_seqlens_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        assert max_seqlen_k >= int(seqused_k.max())
        assert num_splits >= 1
        window = None
        if window_size is not None:
            assert window_size[1] == 0
            window = window_size[0] + 1
        calls.append(len(q))
        return reference.paged_prefill(
            q, cu_seqlens_q, k, v, block_table, seqused_k, softmax_scale, window
        )

    module = ModuleType(MODULE)
    members: dict[str, Any] = {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "is_fa_version_supported": lambda version: is_supported,
        "fa_version_unsupported_reason": lambda version: "needs compute capability 9.0",
    }
    for name, value in members.items():
        setattr(module, name, value)
    return module


@pytest.fixture(autouse=True)
def found_anew(monkeypatch: pytest.MonkeyPatch) -> Any:
    find_flash_attention.cache_clear()
    yield
    find_flash_attention.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, MODULE, module)


def attended(backend: type[TritonAttention], dtype: torch.dtype) -> list[torch.Tensor]:
    """Of two chunks beside a decode, layer by layer."""
    generator = torch.Generator().manual_seed(0)
    shape = (5, 64, 2, 16)
    layers = [tuple(torch.zeros(shape, dtype=dtype) for _ in WINDOWS) for _ in "kv"]
    attention = backend(KVTensors(layers[0], layers[1]), WINDOWS, 0.5)
    tokens = [(7 * index + 3) % 199 for index in range(70)]
    chunk, decode = new_sequence(tokens, [2, 0]), new_sequence(tokens[:1], [1])
    other = new_sequence(tokens[:9], [4])
    batch = plan((chunk, 70), (decode, 1), (other, 9))
    inputs = build_inputs(batch, 64, torch.device("cpu"))
    metadata = attention.prepare(inputs)
    draw = partial(torch.randn, generator=generator)
    return [
        attention.attend(
            layer,
            *[draw(80, heads, 16).to(dtype) for heads in (6, 2, 2)],
            *[draw(80, 1, 16).to(dtype) for _ in ("cos", "sin")],
            metadata,
        )
        for layer in range(len(WINDOWS))
    ]


def test_chunks_go_to_flash_attention_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    install(monkeypatch, fake_flash_attention(calls))
    ours = attended(VllmFlashAttention, torch.bfloat16)
    assert calls == [79] * (len(WINDOWS) - 1), "the last layer attends for single tokens alone"
    for one, other in zip(ours, attended(TritonAttention, torch.bfloat16), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("query_lens", "context_len", "expected"),
    [
        ([128], 65536, 4),
        ([160], 65536, 3),
        ([256], 65536, 2),
        ([384], 65536, 1),  # 96 tiles on 132 SMs
        ([16384], 65536, 1),
        ([128, 64], 65536, 2),
        ([1], 65536, 16),
        ([128], 2048, 2),
        ([128], 200, 1),
    ],
)
def test_a_context_is_cut_into_what_runs_at_once(
    query_lens: list[int], context_len: int, expected: int
) -> None:
    """Of heads like a Llama 3.1 8B's."""
    assert num_splits(tuple(query_lens), 32, 8, context_len, 132) == expected


def test_float32_goes_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    install(monkeypatch, fake_flash_attention(calls))
    ours = attended(VllmFlashAttention, torch.float32)
    assert calls == []
    for one, other in zip(ours, attended(TritonAttention, torch.float32), strict=True):
        torch.testing.assert_close(one, other)


def test_auto_takes_it_on_a_gpu_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(Path("model"), device="cuda:0")
    assert attention_backend(config) is TritonAttention
    find_flash_attention.cache_clear()
    install(monkeypatch, fake_flash_attention([]))
    assert attention_backend(config) is VllmFlashAttention
    assert attention_backend(EngineConfig(Path("model"))) is not VllmFlashAttention


@pytest.mark.parametrize("is_installed", [False, True])
def test_asked_for_where_it_is_not_says_why(
    monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    if is_installed:
        install(monkeypatch, fake_flash_attention([], is_supported=False))
    kv = KVTensors(*[(torch.zeros(1, 64, 1, 16, dtype=torch.bfloat16),)] * 2)
    reason = "needs compute capability 9.0" if is_installed else "No module named 'vllm'"
    with pytest.raises(EngineError, match=rf"needs {MODULE} .*{reason}.*or choose .* triton"):
        VllmFlashAttention(kv, [None], 1.0)
