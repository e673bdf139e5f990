"""What a step costs besides its kernels: no memory, and no wait but for the last step's tokens."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from engine.execution.uploads import Arrival
from engine.sampling_params import SamplingParams
from tests.engine_gpu.engines import (
    DEVICE,
    IS_REHEARSAL,
    SMALL_TIERS,
    VOCAB_SIZE,
    build,
    device_config,
)

pytestmark = pytest.mark.gpu

NUM_STEPS = 50
PARAMS = (
    SamplingParams(400, temperature=0.0),
    SamplingParams(400, temperature=0.8, top_p=0.9, top_k=40, seed=7),
    SamplingParams(400, temperature=1.0, min_p=0.05, seed=3),
)
MAX_STEP_BYTES = 1 << 20  # the rows that are uploaded, and what leaves for the host


@contextmanager
def waits_refused() -> Iterator[None]:
    """What waits for the device raises: copies from and to pageable memory, reading a value. The
    wait for an event, which is how tokens are waited for, is not counted."""
    if IS_REHEARSAL:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


KINDS: dict[str, dict[str, Any]] = {
    "one format": {},
    "tiers": {"tiers": SMALL_TIERS, "dtype": "bfloat16"},
    "tiers that skip": {"tiers": replace(SMALL_TIERS, skip_epsilon=0.5), "dtype": "bfloat16"},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of the cache."""
    changes: dict[str, Any] = request.param
    return changes


def decoding(folder: Path, num_sequences: int, kind: dict[str, Any]) -> Engine:
    """Deep in decodes, all of them in flight."""
    engine, _ = build(device_config(folder, check_integrity=False, **kind))
    choice = random.Random(2)
    for index in range(num_sequences):
        prompt = choice.choices(range(VOCAB_SIZE), k=choice.randint(1, 200))
        engine.add(f"s{index}", prompt, PARAMS[index % len(PARAMS)])
    for _ in range(30):
        engine.step()
    assert engine.stats.num_decode_tokens == num_sequences
    return engine


def end(engine: Engine, num_sequences: int) -> None:
    for index in range(num_sequences):
        engine.abort(f"s{index}")
    while engine.has_work:
        engine.step()


def allocated_bytes() -> int:
    return 0 if IS_REHEARSAL else torch.cuda.memory_allocated(DEVICE)


def peak_bytes() -> int:
    return 0 if IS_REHEARSAL else torch.cuda.max_memory_allocated(DEVICE)


@pytest.mark.parametrize("num_sequences", [1, 3, 8])
def test_decodes_take_no_memory(folder: Path, num_sequences: int, kind: dict[str, Any]) -> None:
    """Tables grow meanwhile, and blocks are demoted: a block is 64 tokens."""
    engine = decoding(folder, num_sequences, kind)
    before = allocated_bytes()
    if not IS_REHEARSAL:
        torch.cuda.reset_peak_memory_stats(DEVICE)
    for _ in range(NUM_STEPS):
        assert engine.step().stats.num_prefill_tokens == 0
    assert allocated_bytes() == before
    assert peak_bytes() <= before + MAX_STEP_BYTES
    end(engine, num_sequences)


def test_a_decode_waits_for_the_tokens_of_the_last_step_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, Any]
) -> None:
    engine = decoding(folder, 8, kind)
    happened: list[str] = []
    monkeypatch.setattr(Arrival, "wait", spy("wait", Arrival.wait, happened))
    monkeypatch.setattr(engine, "_launch", spy("launch", engine._launch, happened))
    with waits_refused():
        for _ in range(NUM_STEPS):
            output = engine.step()
            assert output.stats.num_prefill_tokens == 0
            assert len(output.outputs) == 8
    assert happened == ["launch", "wait"] * NUM_STEPS
    end(engine, 8)


def spy(word: str, call: Callable[..., object], happened: list[str]) -> Callable[..., object]:
    def spied(*arguments: object) -> object:
        happened.append(word)
        return call(*arguments)

    return spied


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_an_abort_in_flight_frees_every_block(
    folder: Path, is_eager: bool, kind: dict[str, Any]
) -> None:
    """And what was in flight does not disturb what comes after, in the same blocks and slots."""
    engine, _ = build(
        device_config(folder, enforce_eager=is_eager, enable_prefix_cache=False, **kind)
    )
    probe = list(range(1, 130))
    greedy = SamplingParams(30, temperature=0.0)
    engine.add("before", probe, greedy)
    before = completion(engine, "before")
    choice = random.Random(4)
    for round_number in range(3):
        names = [f"{round_number}-{index}" for index in range(8)]
        for name in names:
            prompt = choice.choices(range(VOCAB_SIZE), k=choice.randint(1, 300))
            engine.add(name, prompt, SamplingParams(500, temperature=0.0))
        for _ in range(2 + 6 * round_number):  # amid the prompts, and deep in decodes
            engine.step()
        for name in names:
            assert engine.abort(name) is not None
        engine.add("after", probe, greedy)
        assert completion(engine, "after") == before
        assert engine.stats.num_free_blocks == engine.stats.num_blocks


def completion(engine: Engine, name: str) -> list[int]:
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step().outputs:
            tokens += output.token_ids if output.seq_id == name else ()
    return tokens
