"""With its matrices in 8-bit floats the engine on a GPU finds likely what it does on a CPU."""

from math import isfinite
from pathlib import Path
from random import Random

import pytest
import torch

from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from tests.engine_gpu.engines import (
    IS_REHEARSAL,
    VOCAB_SIZE,
    build,
    device_config,
    reference_config,
)

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 16, 17, 64, 127, 250, 300)
NUM_TOP = 20
CHANGES = {"dtype": "bfloat16", "quantization": "fp8"}


def likeliest(config: EngineConfig, num_tokens: int) -> list[list[set[int]]]:
    """After each prompt, and after each greedy token of its answer."""
    engine, _ = build(config)
    choice, params = Random(8), SamplingParams(num_tokens, temperature=0.0, num_logprobs=NUM_TOP)
    for index, length in enumerate(LENGTHS):
        engine.add(str(index), choice.choices(range(VOCAB_SIZE), k=length), params)
    found: list[list[set[int]]] = [[] for _ in LENGTHS]
    while engine.has_work:
        for output in engine.step().outputs:
            assert all(isfinite(each.logprob) for each in output.logprobs)
            tops = ({token for token, _ in each.top} for each in output.logprobs)
            found[int(output.seq_id)] += tops
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[set[int]]:
    if not IS_REHEARSAL and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    return [first for (first,) in likeliest(reference_config(folder, **CHANGES), 1)]


@pytest.mark.parametrize("is_eager", [False, True])
def test_the_likeliest_tokens_are_those_of_a_cpu(
    folder: Path, expected: list[set[int]], is_eager: bool
) -> None:
    """The first ones; a rounding decides which is the very first, so later ones differ."""
    found = likeliest(device_config(folder, enforce_eager=is_eager, **CHANGES), 8)

    assert [len(each) for each in found] == [8] * len(LENGTHS)
    shared = [len(ours[0] & theirs) for ours, theirs in zip(found, expected, strict=True)]
    assert min(shared) >= NUM_TOP // 2, shared
