"""SmolLM2 with its matrices in 8-bit floats goes on as it does in float32, after the same texts."""

from pathlib import Path

import pytest

from engine.build import build_engine
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.sampling_params import SamplingParams
from tests.e2e.test_greedy_parity import QUESTIONS

pytestmark = pytest.mark.model

NUM_FORCED = (0, 3, 6, 9)  # tokens of float32's own answer that come before the one compared
MIN_EQUAL = 0.75  # measured: 0.83
MAX_LOGPROB_ERROR = 0.25  # measured: 0.12


def greedy(
    path: Path, quantization: str | None, prompts: list[list[int]], num_tokens: int
) -> list[list[tuple[int, float]]]:
    """Of each prompt, tokens and their log probabilities."""
    config = EngineConfig(
        path,
        quantization=quantization,
        max_model_len=1_024,
        cache=CacheConfig(kv_cache_bytes=512 << 20),
        scheduler=SchedulerConfig(64, max_num_batched_tokens=1_024),
    )
    engine = build_engine(config)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(num_tokens, temperature=0.0, num_logprobs=0))
    said: list[list[tuple[int, float]]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step().outputs:
            logprobs = (each.logprob for each in output.logprobs)
            said[int(output.seq_id)] += zip(output.token_ids, logprobs, strict=True)
    return said


def test_most_greedy_tokens_stay_and_their_probabilities_hardly_move(smollm2_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in QUESTIONS]
    answers = greedy(smollm2_path, None, prompts, max(NUM_FORCED) + 1)
    forced = [
        prompt + [token for token, _ in answer[:count]]
        for prompt, answer in zip(prompts, answers, strict=True)
        for count in NUM_FORCED
    ]
    exact = [answer[count] for answer in answers for count in NUM_FORCED]

    said = [first for (first,) in greedy(smollm2_path, "fp8", forced, 1)]

    pairs = list(zip(said, exact, strict=True))
    errors = [abs(ours[1] - theirs[1]) for ours, theirs in pairs if ours[0] == theirs[0]]
    assert len(errors) >= MIN_EQUAL * len(pairs)
    assert sum(errors) <= MAX_LOGPROB_ERROR * len(errors)
    assert sum(errors) > 0.01 * len(errors), "nothing was quantised"
