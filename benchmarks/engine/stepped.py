"""Engines timed at their own step(): no server, no tokenizer, greedy, exactly so many tokens."""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from benchmarks.errors import MeasurementFailed

_request_ids = map(str, itertools.count())


class Progressed(NamedTuple):
    """What a step did for one request. `num_cached` prompt tokens came from the prefix cache."""

    request_id: str
    num_new_tokens: int
    num_cached: int


class SteppedEngine(Protocol):
    name: str  # with its version
    vocab_size: int
    facts: dict[str, object]  # as the engine itself resolved them

    @property
    def has_work(self) -> bool: ...

    def add(self, request_id: str, prompt: list[int], num_new_tokens: int) -> None: ...

    def step(self) -> list[Progressed]: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """Seconds from the moment before the first request was added."""

    first_tokens_s: tuple[float, ...]  # of each prompt, in the order given
    steps: tuple[tuple[float, int], ...]  # when a step returned, and its new tokens
    num_cached: int  # over all prompts

    def median_gap_ms(self, batch_size: int) -> float:
        """Between steps in a row that each gave every sequence a token. Raises
        MeasurementFailed when fewer than half of the steps were like that."""
        gaps = [
            end_s - start_s
            for (start_s, before), (end_s, after) in itertools.pairwise(self.steps)
            if before == after == batch_size
        ]
        if 2 * len(gaps) < len(self.steps) - 1 or not gaps:
            raise MeasurementFailed(
                f"expected steps of {batch_size} tokens, got {[count for _, count in self.steps]}"
            )
        return 1e3 * statistics.median(gaps)


def next_request_id() -> str:
    return next(_request_ids)


def generate(
    engine: SteppedEngine, prompts: Sequence[list[int]], num_new_tokens: int
) -> Generation:
    """All prompts at once, until the engine is idle. Raises MeasurementFailed when a request got
    more or fewer tokens than it asked for."""
    started_s = time.perf_counter()
    request_ids = [next_request_id() for _ in prompts]
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        engine.add(request_id, prompt, num_new_tokens)
    received = dict.fromkeys(request_ids, 0)
    cached = dict.fromkeys(request_ids, 0)
    first_tokens_s: dict[str, float] = {}
    steps: list[tuple[float, int]] = []
    while engine.has_work:
        progressed = engine.step()
        now_s = time.perf_counter() - started_s
        for request_id, count, num_cached in progressed:
            received[request_id] += count
            cached[request_id] = max(cached[request_id], num_cached)
            if count:
                first_tokens_s.setdefault(request_id, now_s)
        if num_step_tokens := sum(each.num_new_tokens for each in progressed):
            steps.append((now_s, num_step_tokens))
    if set(received.values()) != {num_new_tokens}:
        raise MeasurementFailed(
            f"{engine.name} gave {sorted(received.values())} tokens, asked for {num_new_tokens}"
        )
    return Generation(
        tuple(first_tokens_s[request_id] for request_id in request_ids),
        tuple(steps),
        sum(cached.values()),
    )
