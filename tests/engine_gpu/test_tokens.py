"""The engine on a GPU says what the engine on a CPU says in plain PyTorch, whatever comes and goes:
with recorded decodes and without, one step ahead and not, and in a pool that is too small."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.execution.decode_graphs import DecodeGraphs
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason
from tests.engine_gpu.engines import VOCAB_SIZE, build, device_config, reference_config

pytestmark = pytest.mark.gpu

NUM_PROMPTS = 24
LAST_ARRIVAL = 60
MAX_STEPS = 5_000
FEW_BLOCKS = 17  # as few as one sequence may need
PARAMS = (
    SamplingParams(150, temperature=0.0),
    SamplingParams(24, temperature=0.8, top_p=0.9, top_k=40, seed=7),
    SamplingParams(16, temperature=1.0, top_p=0.8, seed=11, num_logprobs=3),
    SamplingParams(120, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(220, temperature=0.0, num_logprobs=0),
    SamplingParams(40, temperature=0.9, min_p=0.05, seed=5),
    SamplingParams(12, temperature=0.7, presence_penalty=0.5, seed=3, num_logprobs=1),
    SamplingParams(8, temperature=0.0, logit_bias=((17, 9.0),)),
)


@dataclass(slots=True)
class Said:
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Arrival:
    step: int
    name: str
    prompt: list[int]
    params: SamplingParams


def arrivals() -> list[Arrival]:
    choice = random.Random(6)
    growing = [  # together they need twice the blocks of the small pool
        Arrival(step, f"growing {step}", some_tokens(choice, choice.randint(50, 64)), params)
        for step, params in enumerate((PARAMS[0], PARAMS[3], PARAMS[4]) * 3)
    ]
    shared = some_tokens(choice, 700)
    lengths = [1, 2, 64, 65, 128, 257, 700, *(choice.randint(1, 700) for _ in range(8))]
    others = [
        Arrival(
            choice.randrange(LAST_ARRIVAL),
            f"other {index}",
            shared[:length] if length > 128 and index % 2 == 0 else some_tokens(choice, length),
            PARAMS[index % len(PARAMS)],
        )
        for index, length in enumerate(lengths)
    ]
    assert len(growing) + len(others) == NUM_PROMPTS
    return growing + others


def some_tokens(choice: random.Random, length: int) -> list[int]:
    return choice.choices(range(VOCAB_SIZE), k=length)


def transcript(engine: Engine) -> dict[str, Said]:
    coming = arrivals()
    said = {arrival.name: Said() for arrival in coming}
    step = 0
    while engine.has_work or step < LAST_ARRIVAL:
        for arrival in coming:
            if arrival.step == step:
                engine.add(arrival.name, arrival.prompt, arrival.params)
        for output in engine.step().outputs:
            one = said[output.seq_id]
            assert one.reason is None, f"{output.seq_id} was told more after its end"
            one.tokens += output.token_ids
            one.reason = output.finish_reason
            one.logprobs += [each.logprob for each in output.logprobs]
        step += 1
        assert step < MAX_STEPS
    assert engine.totals.finished_sequences == NUM_PROMPTS
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    return said


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Said]:
    return transcript(build(reference_config(folder))[0])


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
    ("changes", "has_graphs"),
    [
        ({}, True),
        ({"enforce_eager": True}, False),
        ({"async_scheduling": False}, False),
        ({"num_blocks": FEW_BLOCKS}, True),
        ({"num_blocks": FEW_BLOCKS, "async_scheduling": False}, False),
    ],
    ids=["graphs", "eager", "no step ahead", "preempting", "preempting, no step ahead"],
)
def test_the_tokens_are_those_of_a_cpu(
    folder: Path,
    expected: dict[str, Said],
    graph_sizes: list[int],
    changes: dict[str, Any],
    has_graphs: bool,
) -> None:
    engine, _ = build(device_config(folder, **changes))
    said = transcript(engine)
    for name, theirs in expected.items():
        ours = said[name]
        assert (ours.tokens, ours.reason) == (theirs.tokens, theirs.reason), name
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3), name
    assert engine.totals.cached_tokens > 0
    assert (engine.totals.preemptions > 0) == ("num_blocks" in changes)
    if has_graphs:
        assert len(set(graph_sizes)) > 3, "decodes of several sizes were to be replayed"
    else:
        assert graph_sizes == []
