"""Greedy tokens of several ranks equal those of one, through Serve: the real SmolLM2 on three, and
random Llama and Qwen3 models on two and four, one actor for each (imagined) GPU."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import build_engine
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.sampling_params import SamplingParams
from tests.e2e.rank_server import Answer, Case

pytestmark = [pytest.mark.ray, pytest.mark.model]

NUM_NEW_TOKENS = 24
MAX_MODEL_LEN = 640
TOLERANCE = 0.02
SIZES: dict[str, Any] = {
    "vocab_size": 1021,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.rank_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield process
    process.communicate(timeout=60)


def ask(server: subprocess.Popen[str], case: Case) -> Answer:
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
    server.stdin.flush()
    for line in server.stdout:  # Ray's own lines come between
        if line.startswith("{"):
            return Answer(**json.loads(line))
    raise AssertionError(f"the server ended with {server.wait()}")


def random_model(folder: Path, family: str, num_kv_heads: int) -> Path:
    import transformers

    config = getattr(transformers, f"{family}Config")(**SIZES, num_key_value_heads=num_kv_heads)
    torch.manual_seed(1)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return folder


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Of 1 to 600 tokens, some with a common beginning: chunked prefills and prefix hits."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(3, vocab_size, (600,), generator=generator).tolist()
    lengths = (1, 3, 40, 128, 200, 600)
    return [drawn[:length] for length in lengths] + [drawn[90:300]]


def expected_of(model_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    engine = build_engine(
        EngineConfig(
            model_path,
            max_model_len=MAX_MODEL_LEN,
            cache=CacheConfig(kv_cache_bytes=256 << 20),
            scheduler=SchedulerConfig(8, 256),
        )
    )
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(NUM_NEW_TOKENS, temperature=0.0))
    completions: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for output in engine.step().outputs:
            completions[int(output.seq_id)] += output.token_ids
    return completions


def check_parity(
    server: subprocess.Popen[str], model_path: Path, num_ranks: int, vocab_size: int
) -> None:
    prompts = prompts_of(vocab_size)
    expected = expected_of(model_path, prompts)
    case = Case(str(model_path), num_ranks, MAX_MODEL_LEN, NUM_NEW_TOKENS, prompts)
    answer = ask(server, case)
    assert answer.first == expected
    assert answer.second == expected
    assert len(set(answer.pids)) == num_ranks
    for num_bytes in (answer.weight_bytes, answer.kv_bytes):
        assert max(num_bytes) <= (1 + TOLERANCE) * min(num_bytes)


def test_smollm2_on_three_ranks(server, smollm2_path):
    check_parity(server, smollm2_path, 3, 49_152)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("family", "num_kv_heads"), [("Llama", 4), ("Qwen3", 2)])
def test_random_models(server, family, num_kv_heads, num_ranks, tmp_path):
    """Qwen3 has two KV heads: on four ranks, each is held twice."""
    folder = random_model(tmp_path, family, num_kv_heads)
    check_parity(server, folder, num_ranks, 1021)
