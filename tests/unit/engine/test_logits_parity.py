"""Our logits against transformers' own forward, over the paged cache and in awkward chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.execution.model_runner import ModelRunner
from engine.sequence import Sequence
from tests.unit.engine.hand_batch import book, new_sequence, plan, tiny_runner
from tests.unit.engine.tiny_checkpoint import VARIANTS, save_tiny

TOLERANCE = 1e-4


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab_size]"""
    return model(torch.tensor([token_ids])).logits[0]


def prompt(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(199, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def check_step(runner: ModelRunner, model: Any, *chunks: tuple[Sequence, int]) -> int:
    """Compute the chunks and hold the logits of those that sample; returns how many did."""
    batch = plan(*chunks)
    sampling = batch.sampling
    logits = runner.forward(batch)
    book(batch)
    assert logits.shape[0] == len(sampling)
    for row, entry in zip(logits, sampling, strict=True):
        expected = reference_logits(model, entry.sequence.token_ids)[-1]
        torch.testing.assert_close(row, expected, atol=TOLERANCE, rtol=0)
        entry.sequence.token_ids.append(int(row.argmax()))
    return len(sampling)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_prompt_chunks_and_decodes(variant: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, variant)
    runner = tiny_runner(tmp_path)
    long = new_sequence(prompt(150, seed=1), [3, 9, 27, *range(40, 60)])
    short = new_sequence(prompt(9, seed=2), [5, 4])
    single = new_sequence(prompt(1, seed=3), [11])

    num_sampled = check_step(runner, model, (short, 9), (long, 61), (single, 1))
    num_sampled += check_step(runner, model, (single, 1), (long, 1), (short, 1))
    num_sampled += check_step(runner, model, (long, 88), (short, 1), (single, 1))
    for _ in range(3):
        num_sampled += check_step(runner, model, (short, 1), (long, 1), (single, 1))

    assert num_sampled == 2 + 2 + 3 + 9


@pytest.mark.parametrize("variant", ["llama", "mistral, every layer windowed"])
def test_logits_in_bfloat16_stay_near(variant: str, tmp_path: Path) -> None:
    """The narrow path of every op, held by the distance between float32 and bfloat16."""
    from engine.build import build_model_runner
    from engine.config import CacheConfig, EngineConfig

    model = save_tiny(tmp_path, variant)
    cache = CacheConfig(block_size=8, kv_cache_bytes=1 << 22)
    runner = build_model_runner(EngineConfig(tmp_path, dtype="bfloat16", cache=cache))
    sequence = new_sequence(prompt(40, seed=4), list(range(1, 7)))

    logits = runner.forward(plan((sequence, 40)))[0]

    expected = reference_logits(model.to(torch.bfloat16), sequence.token_ids)[-1].float()
    exact = reference_logits(model.float(), sequence.token_ids)[-1]
    assert (logits - expected).norm() < 0.1 * exact.norm()
