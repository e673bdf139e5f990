"""With `deterministic`, what is stored of a sequence follows from its tokens, to the bit: not from
how its prompt was cut, what ran beside it, nor what of it was cached."""

import random
from pathlib import Path

import numpy as np
import pytest

from engine.build import build_engine_around, build_model_runner
from engine.cache.formats import Format, Part
from engine.cache.tier_config import TierConfig
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from tests.unit.engine import test_tiered_engine

folder = test_tiered_engine.folder  # a fixture

PROMPT = random.Random(5).choices(range(199), k=420)
OTHERS = [random.Random(seed).choices(range(199), k=90 + 40 * seed) for seed in range(4)]
NUM_NEW_TOKENS = 70
COLD_FORMATS = ("int4", "k8v4", "int8")


class Bench:
    def __init__(self, folder: Path, cold_format: str, max_num_batched_tokens: int) -> None:
        tiers = TierConfig(
            cold_format=cold_format, sink_tokens=64, hot_tokens=64, warm_tokens=64, cell_tokens=128
        )
        config = EngineConfig(
            folder,
            deterministic=True,
            cache=CacheConfig(kv_cache_bytes=1 << 26, tiers=tiers),
            scheduler=SchedulerConfig(6, max_num_batched_tokens),
            check_integrity=True,
        )
        self.runner: ModelRunner = build_model_runner(config)
        self.engine: Engine = build_engine_around(self.runner, config)

    def complete(self, prompt: list[int], *others: list[int], after: int = 0) -> list[int]:
        """What is said after `prompt`, which comes `after` steps behind the others."""
        params = SamplingParams(NUM_NEW_TOKENS, temperature=0.0)
        for index, other in enumerate(others):
            self.engine.add(f"other {index}", other, params)
        for _ in range(after):
            self.engine.step()
        self.engine.add("it", prompt, params)
        said: list[int] = []
        while self.engine.has_work:
            for output in self.engine.step().outputs:
                said += output.token_ids if output.seq_id == "it" else ()
        return said

    def stored(self) -> dict[bytes, bytes]:
        """Of every block that can be found, by its address, the bytes in all layers."""
        (group,) = self.engine._scheduler._space._groups
        found = {}
        for part in Part:
            arena = group.arenas.of(part)
            for address, block in arena._block_of.items():
                block_format = arena.format_of(block)
                slabs = arena.slabs_of(np.array([block], np.int32), block_format)[0]
                found[address] = b"".join(self._bytes_of(part, block_format, slabs, arena.grain))
        return found

    def _bytes_of(self, part: Part, block_format: Format, slabs: np.ndarray, grain: int):
        for layer in self.runner._kv.layers:
            stored, meta = layer[part], layer[2 + part]
            yield stored[slabs].numpy().tobytes()
            if block_format is not Format.BF16:
                yield meta[slabs // grain].numpy().tobytes()


@pytest.fixture(params=COLD_FORMATS)
def alone(request: pytest.FixtureRequest, folder: Path):
    bench = Bench(folder, request.param, 512)
    said = bench.complete(PROMPT)
    return request.param, said, bench.stored()


def compare(alone, bench: Bench, said: list[int]) -> None:
    _, expected, stored = alone
    assert said == expected
    again = bench.stored()
    common = stored.keys() & again.keys()
    assert common == stored.keys()
    assert len(common) > 20
    assert [each for each in common if stored[each] != again[each]] == []


@pytest.mark.parametrize("max_num_batched_tokens", [7, 50, 193])
def test_however_the_prompt_is_cut(alone, folder, max_num_batched_tokens):
    bench = Bench(folder, alone[0], max_num_batched_tokens)
    compare(alone, bench, bench.complete(PROMPT))


def test_whatever_runs_beside_it(alone, folder):
    bench = Bench(folder, alone[0], 128)
    compare(alone, bench, bench.complete(PROMPT, *OTHERS, after=9))


def test_whatever_of_it_was_cached(alone, folder):
    bench = Bench(folder, alone[0], 100)
    bench.complete([*PROMPT[:330], 1, 2, 3])
    said = bench.complete(PROMPT)
    assert bench.engine.totals.cached_tokens >= 256
    compare(alone, bench, said)
