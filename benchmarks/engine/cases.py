"""What is measured of a stepped engine. Samples of a case come one by one, so that what a job has
measured by its deadline counts."""

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from benchmarks.engine.stepped import SteppedEngine, generate
from benchmarks.errors import MeasurementFailed

Samples = Mapping[str, float]
SEED = 1


class Bench:
    """An engine, its prompts of random ids, and the time left."""

    def __init__(self, engine: SteppedEngine, repeats: int, deadline_s: float) -> None:
        self.engine = engine
        self._repeats = repeats
        self._deadline_s = deadline_s  # of time.time()
        self._random = random.Random(SEED)
        self._kept: dict[tuple[int, int], list[int]] = {}
        self._primed: set[tuple[int, int]] = set()

    def rounds(self, at_least: int = 0) -> Iterator[int]:
        """Raises MeasurementFailed when the time is up."""
        for index in range(max(self._repeats, at_least)):
            if time.time() > self._deadline_s:
                raise MeasurementFailed(f"out of time after {index} samples")
            yield index

    def fresh(self, num_tokens: int) -> list[int]:
        """A prompt that no cache has seen."""
        return [self._random.randrange(10, self.engine.vocab_size) for _ in range(num_tokens)]

    def kept(self, num_tokens: int, indices: range) -> list[list[int]]:
        """The same prompts at every call."""
        for index in indices:
            if (num_tokens, index) not in self._kept:
                self._kept[num_tokens, index] = self.fresh(num_tokens)
        return [self._kept[num_tokens, index] for index in indices]

    def mark_primed(self, num_tokens: int, indices: range) -> None:
        self._primed.update((num_tokens, index) for index in indices)

    def prime(self, num_tokens: int, indices: range) -> None:
        """Leave the kept prompts in the prefix cache."""
        if all((num_tokens, index) in self._primed for index in indices):
            return
        generate(self.engine, self.kept(num_tokens, indices), 1)
        self.mark_primed(num_tokens, indices)


class Case(Protocol):
    kind: ClassVar[str]

    @property
    def name(self) -> str: ...

    def samples(self, bench: Bench) -> Iterator[Samples]:
        """By the names of what is measured. Raises MeasurementFailed."""


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """Milliseconds a step: the median gap of a run whose prompts were in the prefix cache."""

    kind: ClassVar[str] = "decode"
    name: str
    batch: int
    context: int
    num_steps: int = 100

    def samples(self, bench: Bench) -> Iterator[Samples]:
        indices = range(self.batch)
        bench.prime(self.context, indices)
        prompts = bench.kept(self.context, indices)
        for _ in bench.rounds():
            run = generate(bench.engine, prompts, self.num_steps)
            yield {self.name: run.median_gap_ms(self.batch)}


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """Tokens a second of groups of prompts, from the first one added to the last first token. The
    prompts stay in the prefix cache for the decode cases."""

    kind: ClassVar[str] = "prefill"
    name: str
    context: int
    group: int
    num_groups: int

    def samples(self, bench: Bench) -> Iterator[Samples]:
        for index in bench.rounds(self.num_groups):
            indices = range(index * self.group, (index + 1) * self.group)
            run = generate(bench.engine, bench.kept(self.context, indices), 1)
            _require_fresh(run.num_cached)
            bench.mark_primed(self.context, indices)
            yield {self.name: self.group * self.context / max(run.first_tokens_s)}


@dataclass(frozen=True, slots=True)
class FirstTokenCase:
    """Milliseconds to the first token of a fresh prompt on an idle engine."""

    kind: ClassVar[str] = "first token"
    name: str
    context: int

    def samples(self, bench: Bench) -> Iterator[Samples]:
        for _ in bench.rounds():
            run = generate(bench.engine, [bench.fresh(self.context)], 1)
            _require_fresh(run.num_cached)
            yield {self.name: 1e3 * run.first_tokens_s[0]}


def described(case: Case) -> dict[str, Any]:
    """As JSON has it."""
    return {"kind": case.kind, **asdict(case)}  # type: ignore[call-overload]


def _require_fresh(num_cached: int) -> None:
    if num_cached:
        raise MeasurementFailed(f"expected prompts that no cache had seen, {num_cached} tokens hit")
