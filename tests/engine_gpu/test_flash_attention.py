"""A long prompt by FlashAttention 3, where vllm carries it, gives the logits of our own kernels."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.drawn_tokens import DrawnTokens
from engine.execution.flash_attention import find_flash_attention
from engine.execution.sampler import Sampler
from engine.sampling_params import SamplingParams
from tests.engine_gpu.engines import (
    IS_REHEARSAL,
    VOCAB_SIZE,
    build,
    device_config,
    reference_config,
)
from tests.unit.engine.test_flash_attention import fake_flash_attention, install

pytestmark = pytest.mark.gpu

NUM_PROMPT_TOKENS = 3000
CHUNK_TOKENS = 512
MAX_RELATIVE_ERROR = 0.05  # of bfloat16; measured 0.024 on a CPU


class KeepingSampler(Sampler):
    """Remembers the logits."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def draw(self, logits: torch.Tensor, *arguments: Any) -> DrawnTokens:
        self.logits += logits.float().cpu().clone()
        return super().draw(logits, *arguments)


@pytest.fixture
def _flash_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if IS_REHEARSAL:
        find_flash_attention.cache_clear()
        install(monkeypatch, fake_flash_attention([]))
    module, reason = find_flash_attention()
    if module is None:
        pytest.skip(f"needs FlashAttention 3 of vllm: {reason}")
    yield
    if IS_REHEARSAL:
        find_flash_attention.cache_clear()


def logits_of(config: Any) -> torch.Tensor:
    """[vocab_size], after the prompt."""
    engine, runner = build(config)
    sampler = KeepingSampler()
    runner._sampler = sampler
    prompt = random.Random(8).choices(range(VOCAB_SIZE), k=NUM_PROMPT_TOKENS)
    engine.add("long", prompt, SamplingParams(1, temperature=0.0))
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert num_steps > NUM_PROMPT_TOKENS // CHUNK_TOKENS
    (logits,) = sampler.logits
    return logits


@pytest.mark.usefixtures("_flash_attention")
def test_logits_of_a_long_prompt_are_those_of_our_kernels(folder: Path) -> None:
    limits: dict[str, Any] = {"max_model_len": 3072, "max_num_batched_tokens": CHUNK_TOKENS}
    exact = logits_of(reference_config(folder, **limits))

    def error_of(backend: str) -> float:
        fields: dict[str, Any] = {
            "dtype": "bfloat16",
            "attention_backend": backend,
            "enforce_eager": True,
        }
        difference = logits_of(device_config(folder, **limits, **fields)) - exact
        return float(difference.norm() / exact.norm())

    ours, theirs = error_of("triton"), error_of("vllm_flash_attn")
    assert ours <= MAX_RELATIVE_ERROR
    assert theirs <= max(1.5 * ours, 0.01)
