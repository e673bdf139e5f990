"""The whole engine over a cache that ages, on the real SmolLM2: answers stay those of the exact
cache, and what one request left another begins with."""

from pathlib import Path

import pytest

from engine.build import build_engine
from engine.cache.tier_config import TierConfig
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.sampling_params import SamplingParams
from tests.e2e.test_greedy_parity import log_book

pytestmark = pytest.mark.model

NUM_NEW_TOKENS = 12
MAX_MODEL_LEN = 2_048
# By what a greedy token's log probability may move: seen were .008, .026 and .057 behind 1,500.
BOUNDS = {"int8": 0.02, "k8v4": 0.05, "int4": 0.1}


def engine_of(folder: Path, cold_format: str | None):
    return build_engine(
        EngineConfig(
            folder,
            max_model_len=MAX_MODEL_LEN,
            cache=CacheConfig(
                256 << 20, tiers=TierConfig(cold_format=cold_format) if cold_format else None
            ),
            scheduler=SchedulerConfig(4, 512),
            check_integrity=True,
        )
    )


def complete(engine, **prompts):
    """Of each: tokens, log probabilities, tokens that were cached."""
    params = SamplingParams(NUM_NEW_TOKENS, temperature=0.0, num_logprobs=0)
    found = {name: ([], [], []) for name in prompts}
    for name, prompt in prompts.items():
        engine.add(name, prompt, params)
    while engine.has_work:
        for output in engine.step().outputs:
            tokens, logprobs, cached = found[output.seq_id]
            tokens += output.token_ids
            logprobs += [each.logprob for each in output.logprobs]
            cached.append(output.usage.cached_tokens)
    return {name: (tokens, lp, cached[-1]) for name, (tokens, lp, cached) in found.items()}


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> dict[str, list[int]]:
    """Long enough for most of it to be cold; and one with the same start."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))
    long = tokenizer.encode(log_book(72)).ids
    return {"long": long, "other": long[:1_400] + tokenizer.encode(" The end. Once upon").ids}


@pytest.fixture(scope="module")
def exact(smollm2_path: Path, prompts):
    return complete(engine_of(smollm2_path, None), **prompts)


@pytest.mark.parametrize("cold_format", BOUNDS)
def test_answers_are_those_of_the_exact_cache(smollm2_path: Path, prompts, exact, cold_format: str):
    engine = engine_of(smollm2_path, cold_format)
    came = complete(engine, **prompts)
    for name, (tokens, logprobs, _) in came.items():
        expected_tokens, expected_logprobs, _ = exact[name]
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected_logprobs, abs=BOUNDS[cold_format])
        assert logprobs != expected_logprobs  # it is another cache
    again = complete(engine, again=prompts["long"])["again"]
    assert again[0] == came["long"][0]
    assert again[2] >= len(prompts["long"]) - 64  # what it had decoded behind it is no matter
