"""`deterministic`: a request says bit for bit the same alone and among 64 others."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.cache.tier_config import TierConfig
from engine.engine import Engine
from engine.outputs import PendingTokens, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from tests.engine_gpu.engines import (
    IS_REHEARSAL,
    SMALL_TIERS,
    VOCAB_SIZE,
    build,
    device_config,
)

pytestmark = pytest.mark.gpu

NUM_TOKENS = 20 if IS_REHEARSAL else 200
NUM_OTHERS = 64
CHECKED = {
    "one block and more": (70, SamplingParams(NUM_TOKENS, temperature=0.0, num_logprobs=3)),
    "sampled": (
        150,
        SamplingParams(NUM_TOKENS, temperature=0.9, top_p=0.9, seed=4, num_logprobs=2),
    ),
    "two tokens": (2, SamplingParams(NUM_TOKENS, temperature=1.0, seed=9, num_logprobs=1)),
    "longest": (300, SamplingParams(NUM_TOKENS, temperature=0.0, num_logprobs=0)),
}


@dataclass(slots=True)
class Said:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def engine_of(folder: Path, tiers: TierConfig | None, max_num_batched_tokens: int = 512) -> Engine:
    """Without a prefix cache: the second run would find what the first has computed."""
    config = device_config(
        folder,
        dtype="bfloat16",
        deterministic=True,
        max_num_sequences=min(NUM_OTHERS + len(CHECKED), max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=512,
        enable_prefix_cache=False,
        tiers=tiers,
    )
    return build(config)[0]


def prompt_of(name: str) -> list[int]:
    return random.Random(name).choices(range(VOCAB_SIZE), k=CHECKED[name][0])


def add_others(engine: Engine, choice: random.Random, first: int, last: int) -> None:
    for index in range(first, last):
        prompt = choice.choices(range(VOCAB_SIZE), k=choice.randint(2, 300))
        temperature = choice.choice((0.0, 0.8))
        params = SamplingParams(NUM_TOKENS, temperature=temperature, seed=index)
        engine.add(f"other {index}", prompt, params)


def run(engine: Engine, names: list[str]) -> dict[str, Said]:
    said = {name: Said() for name in names}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.seq_id in said:
                said[output.seq_id].tokens += output.token_ids
                said[output.seq_id].logprobs += output.logprobs
    return said


def watch_chunks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Into how many tokens at a time prompts are cut, from now on."""
    chunks: dict[str, list[int]] = {}
    launch = engine._launch

    def watched(batch: ScheduledBatch) -> PendingTokens:
        for entry in batch.scheduled:
            if not entry.is_decode:
                chunks.setdefault(entry.sequence.seq_id, []).append(entry.num_new_tokens)
        return launch(batch)

    monkeypatch.setattr(engine, "_launch", watched)
    return chunks


@pytest.fixture(scope="module", params=[None, SMALL_TIERS], ids=["one format", "tiers"])
def tiers(request: pytest.FixtureRequest) -> TierConfig | None:
    tiers: TierConfig | None = request.param
    return tiers


@pytest.fixture(scope="module")
def engine(folder: Path, tiers: TierConfig | None) -> Engine:
    return engine_of(folder, tiers)


def test_alone_as_among_64_others(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the others are there before, so that prompts are cut and decodes are beside them."""
    alone = {}
    for name, (_, params) in CHECKED.items():
        engine.add(name, prompt_of(name), params)
        alone |= run(engine, [name])
    chunks = watch_chunks(engine, monkeypatch)
    choice = random.Random(1)
    add_others(engine, choice, 0, NUM_OTHERS // 2)
    for _ in range(5):
        engine.step()
    for name, (_, params) in CHECKED.items():
        engine.add(name, prompt_of(name), params)
    add_others(engine, choice, NUM_OTHERS // 2, NUM_OTHERS)
    among = run(engine, list(CHECKED))
    assert engine.totals.preemptions == 0
    assert max(len(chunks[name]) for name in CHECKED) > 1, "a prompt was to be cut"
    # A single token goes through the kernel of decodes: docs/gpu-step.md says so.
    assert all(chunks[name][-1] > 1 for name in CHECKED)
    for name, theirs in alone.items():
        assert len(theirs.tokens) == len(theirs.logprobs) == NUM_TOKENS
        assert_same(among[name], theirs)


@pytest.mark.parametrize("length", [66, 130, 258, 300])
def test_however_a_prompt_is_cut(
    engine: Engine,
    folder: Path,
    tiers: TierConfig | None,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
) -> None:
    params = SamplingParams(20, temperature=0.0, num_logprobs=2)
    prompt = random.Random(length).choices(range(VOCAB_SIZE), k=length)
    engine.add("whole", prompt, params)
    whole = run(engine, ["whole"])["whole"]
    small = engine_of(folder, tiers, max_num_batched_tokens=64)
    chunks = watch_chunks(small, monkeypatch)
    small.add("cut", prompt, params)
    cut = run(small, ["cut"])["cut"]
    assert chunks["cut"] == [64] * (length // 64) + [length % 64]
    assert len(whole.tokens) == 20
    assert_same(cut, whole)


def assert_same(ours: Said, theirs: Said) -> None:
    if IS_REHEARSAL:  # a CPU's products promise no such thing
        assert len(ours.tokens) == len(theirs.tokens)
    else:
        assert ours == theirs
