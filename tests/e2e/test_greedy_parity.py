"""Greedy tokens of the whole engine equal transformers' `generate` on the real SmolLM2, in float32:
alone, in mixed batches with chunked prefill, through preemption, and over a shared prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.build import build_engine
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.outputs import Usage
from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.model

NUM_NEW_TOKENS = 20
END_OF_TURN = 2
QUESTIONS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "SELECT name FROM users WHERE",
    "The three primary colours are red,",
    "In 1969, the first humans",
    "My favourite recipe starts with two eggs and",
    "E = mc^2 means that",
    "To be, or not to be, that is",
    "El perro corre por el parque y",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nList three European rivers.<|im_end|>\n<|im_start|>assistant\n",
    "Dear Sir or Madam, I am writing to",
)


def log_book(num_days: int) -> str:
    """Prose of about 20 tokens a day that no two days share."""
    places = ("the harbour", "a quiet bay", "the northern cape", "an island", "open water")
    days = (
        f"On day {day} the ship sailed {day * 37 % 91} miles and reached {places[day % 5]} "
        f"under {('a clear sky', 'heavy rain', 'thick fog')[day % 3]}."
        for day in range(1, num_days + 1)
    )
    return " ".join(days) + " On the next day the ship"


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    texts = (*QUESTIONS, *(log_book(num_days) for num_days in (3, 5, 10, 20, 52, 95)))
    return [tokenizer.encode(text).ids for text in texts]


@pytest.fixture(scope="module")
def expected(smollm2_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    completions = []
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            use_cache=True,
            eos_token_id=END_OF_TURN,
            pad_token_id=END_OF_TURN,
        )
        completions.append(output[0, len(prompt) :].tolist())
    return completions


def start(
    path: Path, max_num_sequences: int, max_model_len: int = 2_304, **cache: int | bool
) -> Engine:
    return build_engine(
        EngineConfig(
            path,
            max_model_len=max_model_len,
            cache=CacheConfig(**{"kv_cache_bytes": 384 << 20} | cache),
            scheduler=SchedulerConfig(max_num_sequences, max_num_batched_tokens=256),
            check_integrity=True,
        )
    )


@dataclass(frozen=True)
class Finished:
    completions: list[list[int]]
    usages: list[Usage]
    num_preempted: int


def run(engine: Engine, prompts: Sequence[list[int]]) -> Finished:
    """All prompts at once; what became of them in the order given."""
    params = SamplingParams(
        NUM_NEW_TOKENS, temperature=0.0, stop_token_ids=frozenset({END_OF_TURN})
    )
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, params)
    completions: list[list[int]] = [[] for _ in prompts]
    usages: dict[int, Usage] = {}
    num_preempted = 0
    while engine.has_work:
        step = engine.step()
        num_preempted += step.stats.num_preempted
        for output in step.outputs:
            completions[int(output.seq_id)] += output.token_ids
            usages[int(output.seq_id)] = output.usage
    return Finished(completions, [usages[index] for index in range(len(prompts))], num_preempted)


def test_the_prompts_are_of_many_lengths(
    prompts: list[list[int]], expected: list[list[int]]
) -> None:
    lengths = sorted(len(prompt) for prompt in prompts)
    assert len(lengths) >= 20
    assert lengths[0] <= 5
    assert 1_000 <= lengths[-2] <= lengths[-1] <= 2_000
    assert lengths[-1] >= 1_900
    assert sum(len(completion) for completion in expected) > 16 * len(prompts)


def test_one_at_a_time(
    smollm2_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = start(smollm2_path, max_num_sequences=1)
    assert run(engine, prompts).completions == expected


def test_mixed_batches_of_eight_with_chunked_prefill(
    smollm2_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Longest first: their chunks of the budget run beside the decodes of the others."""
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]) % 1_777)
    engine = start(smollm2_path, max_num_sequences=8)

    finished = run(engine, [prompts[index] for index in order])

    assert finished.completions == [expected[index] for index in order]


def test_through_preemption(
    smollm2_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Seventeen blocks of sixteen tokens for eight sequences that grow to two or three each."""
    block_bytes = 30 * 2 * 16 * 3 * 64 * 4
    chosen = [index for index, prompt in enumerate(prompts) if len(prompt) <= 120]
    engine = start(
        smollm2_path,
        max_num_sequences=8,
        max_model_len=240,
        kv_cache_bytes=17 * block_bytes,
        block_size=16,
        enable_prefix_cache=False,
    )

    finished = run(engine, [prompts[index] for index in chosen])

    assert finished.num_preempted > 0
    assert finished.completions == [expected[index] for index in chosen]


def test_over_a_cached_prefix(
    smollm2_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A second asking reads the first one's blocks; the log books share theirs from the start."""
    chosen = [index for index, prompt in enumerate(prompts) if 64 < len(prompt) < 1_500]
    engine = start(smollm2_path, max_num_sequences=4, block_size=16)
    wanted = [expected[index] for index in chosen]

    first = run(engine, [prompts[index] for index in chosen])
    second = run(engine, [prompts[index] for index in chosen])

    assert first.completions == wanted
    assert second.completions == wanted
    assert max(usage.prompt_tokens for usage in second.usages) > 1_000
    for usage in second.usages:
        assert usage.prompt_tokens - usage.cached_tokens <= 16
