from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.engine.prompts import prompts
from benchmarks.engine.throughput import take_turns
from benchmarks.errors import MeasurementFailed


class Counter:
    """Continues every prompt by counting on; `calls` are in the order of all contestants."""

    def __init__(self, name: str, calls: list[str], step: int = 1) -> None:
        self.name = name
        self.calls = calls
        self.step = step

    def generate(self, prompts: Sequence[list[int]], num_new_tokens: int) -> list[list[int]]:
        self.calls.append(self.name)
        return [
            [prompt[-1] + self.step * (n + 1) for n in range(num_new_tokens)] for prompt in prompts
        ]


def test_both_take_turns_after_one_unmeasured_round():
    calls: list[str] = []
    lines: list[str] = []
    ours, peer = Counter("ours", calls), Counter("peer", calls)

    turns = take_turns(ours, peer, [[1], [5]], 4, 3, lines.append)

    assert calls == ["peer", *["ours", "peer"] * 4]
    assert len(turns.ours) == len(turns.peer) == 3
    assert min(turns.ours + turns.peer) > 0
    assert len(lines) == 6


def test_other_tokens_than_the_peers_are_no_measurement():
    calls: list[str] = []
    with pytest.raises(MeasurementFailed, match="other tokens"):
        take_turns(Counter("ours", calls, 2), Counter("peer", calls), [[1]], 4, 1, calls.append)


def test_prompts_have_one_length_and_differ(smollm2_path: Path):
    batch = prompts(smollm2_path, 8, 64)
    assert {len(prompt) for prompt in batch} == {64}
    assert len({tuple(prompt) for prompt in batch}) == 8
