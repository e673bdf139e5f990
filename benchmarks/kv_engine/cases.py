"""What is measured of a stepped engine besides the cases of `benchmarks.engine`."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from benchmarks.engine.cases import Bench, Samples
from benchmarks.engine.stepped import generate
from benchmarks.errors import MeasurementFailed


@dataclass(frozen=True, slots=True)
class KeptFirstTokenCase:
    """Milliseconds to the first token of a fresh prompt on an idle engine, `num_prompts` times at
    most. The prompts stay in the prefix cache for the decode cases."""

    kind: ClassVar[str] = "first token, kept"
    name: str
    context: int
    num_prompts: int

    def samples(self, bench: Bench) -> Iterator[Samples]:
        for index in islice(bench.rounds(), self.num_prompts):
            its = range(index, index + 1)
            run = generate(bench.engine, bench.kept(self.context, its), 1)
            if run.num_cached:
                raise MeasurementFailed(f"expected a fresh prompt, {run.num_cached} tokens hit")
            bench.mark_primed(self.context, its)
            yield {self.name: 1e3 * run.first_tokens_s[0]}


@dataclass(frozen=True, slots=True)
class MadeUpDecodeCase:
    """Milliseconds a step of one sequence that has `context` tokens of keys and values, its newest
    among them: made up, for to compute them takes minutes. They overwrite the cache, of which the
    engine is not told: nothing may be measured after this."""

    kind: ClassVar[str] = "decode, made up"
    name: str
    context: int
    num_steps: int = 100

    def samples(self, bench: Bench) -> Iterator[Samples]:
        from benchmarks.kv_engine.made_up import MadeUpStep  # the peer's process has no engine

        runner = getattr(bench.engine, "runner", None)
        if runner is None:
            raise MeasurementFailed(f"{bench.engine.name} shows no runner to launch steps of")
        step = MadeUpStep.of(runner, self.context)
        for _ in bench.rounds():
            yield {self.name: step.median_gap_ms(self.num_steps)}
