"""A cache whose tokens age, on a GPU: logits are those of the references on a CPU, through every
tier, recorded and not; and a crowd leaves nothing behind."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cache.tier_config import TierConfig
from engine.execution.decode_graphs import DecodeGraphs
from engine.execution.drawn_tokens import DrawnTokens
from engine.execution.model_runner import ModelRunner
from engine.execution.sampler import Sampler
from engine.sampling_params import SamplingParams
from tests.engine_gpu.engines import (
    IS_REHEARSAL,
    SMALL_TIERS,
    VOCAB_SIZE,
    build,
    device_config,
)
from tests.unit.engine.tiered_plans import TieredPlans

pytestmark = pytest.mark.gpu

NUM_PROMPT_TOKENS, NUM_DECODES = 1_400, 9 if IS_REHEARSAL else 150
CHUNKS = (700, 511, 189)
MAX_MODEL_LEN = 2_048
ON_CPU = {"device": "cpu", "async_scheduling": False}
COLD_FORMATS = ("k8v4",) if IS_REHEARSAL else ("int4", "k8v4", "int8")
NUM_ARRIVALS = 9 if IS_REHEARSAL else 30


class KeepingSampler(Sampler):
    """Remembers the logits of the first row."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def draw(self, logits: torch.Tensor, *arguments: Any) -> DrawnTokens:
        self.logits += logits[:1].float().cpu().clone()
        return super().draw(logits, *arguments)


def some_tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def logits_of(runner: ModelRunner, *, are_beside_others: bool = False) -> torch.Tensor:
    """[1 + NUM_DECODES, vocab_size], after a prompt and each token of a text that follows it; with
    a shorter one beside it, whose own are not kept."""
    plans = TieredPlans(runner.tier_groups)
    sampler = KeepingSampler()
    runner._sampler = sampler
    sequence = plans.open(some_tokens(1, NUM_PROMPT_TOKENS))
    other = plans.open(some_tokens(2, 300))
    for num_tokens in CHUNKS:
        batch = plans.plan((sequence, num_tokens))
        runner.execute(batch)
        plans.book(batch)
    if are_beside_others:
        batch = plans.plan((other, 300))
        runner.execute(batch)
        plans.book(batch)
        del sampler.logits[-1]
    for token_id in some_tokens(3, NUM_DECODES):
        chunks = [(sequence, 1)]
        sequence.token_ids.append(token_id)
        if are_beside_others:
            other.token_ids.append(token_id)
            chunks.append((other, 1))
        batch = plans.plan(*chunks)
        runner.execute(batch)
        plans.book(batch)
    return torch.stack(sampler.logits)


def config_of(folder: Path, cold_format: str, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_num_batched_tokens": 1_024,
        "max_model_len": MAX_MODEL_LEN,
        "tiers": TierConfig(cold_format=cold_format),
    }
    return device_config(folder, **fields | changes)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By cold format, of the references in bfloat16; and how far each row is from those in
    float32."""
    found = {}
    for cold_format in COLD_FORMATS:
        narrow, wide = (
            logits_of(build(config_of(folder, cold_format, dtype=dtype, **ON_CPU))[1])
            for dtype in ("bfloat16", "float32")
        )
        found[cold_format] = narrow, relative_errors(narrow, wide)
    return found


def relative_errors(came: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (came - right).norm(dim=-1) / right.norm(dim=-1)


@pytest.mark.parametrize("cold_format", COLD_FORMATS)
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_backend": "auto"},
        {},
        {"enforce_eager": True},
        {"deterministic": True},
    ],
    ids=["as it comes", "our kernels", "eager", "deterministic"],
)
def test_the_logits_are_those_of_the_references(
    folder: Path,
    expected: dict[str, tuple[torch.Tensor, torch.Tensor]],
    cold_format: str,
    changes: dict[str, Any],
) -> None:
    """No further than two ways to round are apart, each as far from float32 as the references."""
    _, runner = build(config_of(folder, cold_format, **changes))
    right, noise = expected[cold_format]
    for are_beside_others in (False, True):
        errors = relative_errors(logits_of(runner, are_beside_others=are_beside_others), right)
        assert errors.mean() < 1.5 * noise.mean(), (errors, noise)
        assert errors.max() < 2 * noise.max(), (errors, noise)


@pytest.fixture
def graph_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many sequences each replay decoded."""
    sizes: list[int] = []
    run = DecodeGraphs.run

    def count(graphs: DecodeGraphs, batch: Any, slots: list[int]) -> Any:
        sizes.append(len(slots))
        return run(graphs, batch, slots)

    monkeypatch.setattr(DecodeGraphs, "run", count)
    return sizes


@pytest.mark.parametrize(
    ("num_blocks", "prompt_lens", "answer_lens"),
    [(1_024, (1, 600), (20, 200)), (25, (30, 60), (280, 300))],
    ids=["roomy", "preempting"],
)
def test_a_crowd_comes_and_goes(
    folder: Path,
    graph_sizes: list[int],
    num_blocks: int,
    prompt_lens: tuple[int, int],
    answer_lens: tuple[int, int],
) -> None:
    tiers = replace(SMALL_TIERS, cold_format="int4")
    config = device_config(folder, num_blocks=num_blocks, dtype="bfloat16", tiers=tiers)
    engine, _ = build(config)
    choice = random.Random(6)
    common = some_tokens(4, 400)
    for index in range(NUM_ARRIVALS):
        prompt = some_tokens(100 + index, choice.randint(*prompt_lens))
        if len(prompt) > len(common):
            prompt[: len(common)] = common
        params = SamplingParams(
            choice.randint(*answer_lens), temperature=0.7, seed=index, num_logprobs=1
        )
        engine.add(f"s{index}", prompt, params)
    logprobs: list[float] = []
    while engine.has_work:
        for output in engine.step().outputs:
            logprobs += [each.logprob for each in output.logprobs]
    assert torch.tensor(logprobs).isfinite().all()
    assert engine.totals.finished_sequences == NUM_ARRIVALS
    assert (engine.totals.preemptions > 0) == (num_blocks == 25)
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    assert len(set(graph_sizes)) > 3, "decodes of several sizes were to be replayed"
