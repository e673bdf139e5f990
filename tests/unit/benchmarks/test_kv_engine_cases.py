"""What the benchmark of the tiered engine measures, on a CPU: a tiny engine, and what fits."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.engine.cases import Bench, DecodeCase, described
from benchmarks.engine.gpu_process import GpuProcesses
from benchmarks.engine.job import Job, run_job
from benchmarks.engine.shapes import Shape
from benchmarks.engine.stepped import Progressed
from benchmarks.errors import MeasurementFailed
from benchmarks.interference.case import (
    ITL_P99,
    LONG_TTFT,
    QUIET_ITL_P50,
    SHORT_TTFT_P95,
    InterferenceCase,
)
from benchmarks.kv_engine.bars import LEAST_FIT
from benchmarks.kv_engine.capacity import EXACT, fit_of
from benchmarks.kv_engine.cases import KeptFirstTokenCase, MadeUpDecodeCase
from benchmarks.kv_engine.made_up import MadeUpStep, bf16_slabs
from engine.build import build_model_runner
from engine.cache.formats import Part
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_span import View
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.execution.model_runner import ModelRunner
from engine.execution.tiered_kv import TieredKV
from engine.models.model_config import ModelConfig

TINY = Shape("tiny", 64, 64, 2, 2, 1, 64, 256, 1e4, False)
ONE_LAYER = Shape("one layer", 128, 64, 1, 1, 1, 128, 256, 1e4, False)
MAX_MODEL_LEN = 2048


def test_ours_measures_every_kind_of_case_with_tiers(tmp_path: Path) -> None:
    cases = (
        KeptFirstTokenCase("first", 900, num_prompts=3),
        DecodeCase("decode", 2, 900, num_steps=12),
        InterferenceCase(
            num_streams=2,
            stream_context=30,
            long_context=1200,
            short_context=20,
            short_every_s=0.01,
            quiet_s=0.1,
            num_stream_tokens=800,
            max_s=10,
        ),
        MadeUpDecodeCase("made up", 1500, num_steps=5),
    )
    told = Job(
        "flashray",
        str(TINY.write(tmp_path / "m", MAX_MODEL_LEN)),
        tuple(described(case) for case in cases),
        seconds=60,
        repeats=2,
        device="cpu",
        dtype="float32",
        kv_cache_bytes=4 << 20,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=1024,
        cold_format="int4",
    )

    outcome = run_job(told, GpuProcesses(), lambda message: None)

    assert outcome.failed == {}
    interference = (ITL_P99, SHORT_TTFT_P95, LONG_TTFT, QUIET_ITL_P50)
    assert outcome.samples.keys() == {"first", "decode", *interference, "made up"}
    assert {len(values) for values in outcome.samples.values()} == {2}
    assert all(0 < value < 5e3 for values in outcome.samples.values() for value in values)
    assert outcome.facts["cold_format"] == "int4"
    assert outcome.facts["attention"] == "tiers, prompts by TritonAttention"
    assert outcome.facts["kv_bytes"] <= 4 << 20


class Echo:
    """Answers at once, and has cached every prompt that it was ever given."""

    name, vocab_size = "echo", 100

    def __init__(self) -> None:
        self.facts: dict[str, object] = {}
        self.prompts: list[list[int]] = []
        self._answers: list[Progressed] = []

    @property
    def has_work(self) -> bool:
        return bool(self._answers)

    def add(self, request_id: str, prompt: list[int], num_new_tokens: int) -> None:
        num_cached = len(prompt) if prompt in self.prompts else 0
        self._answers.append(Progressed(request_id, num_new_tokens, num_cached))
        self.prompts.append(prompt)

    def step(self) -> list[Progressed]:
        answers, self._answers = self._answers, []
        return answers


def test_prompts_of_a_first_token_are_kept_for_the_decodes() -> None:
    engine = Echo()
    bench = Bench(engine, 3, time.time() + 60)
    case = KeptFirstTokenCase("first", 8, num_prompts=2)
    assert len(list(case.samples(bench))) == 2
    bench.prime(8, range(2))
    assert len(engine.prompts) == 2, "they were primed already"
    bench.prime(8, range(3))
    assert engine.prompts[:2] == engine.prompts[2:4]
    with pytest.raises(MeasurementFailed, match="expected a fresh prompt, 8 tokens hit"):
        list(case.samples(bench))
    with pytest.raises(MeasurementFailed, match="echo shows no runner"):
        list(MadeUpDecodeCase("made up", 8).samples(bench))


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], ModelRunner]:
    folder = TINY.write(tmp_path_factory.mktemp("tiny"), MAX_MODEL_LEN)

    def runner_of(cold_format: str | None) -> ModelRunner:
        tiers = None if cold_format is None else TierConfig(cold_format=cold_format)
        cache = CacheConfig(3 << 20, tiers=tiers)
        return build_model_runner(
            EngineConfig(
                folder, load_format="dummy", cache=cache, scheduler=SchedulerConfig(4, 1024)
            )
        )

    return runner_of


@pytest.mark.parametrize("cold_format", ["int4", "k8v4", "int8"])
def test_what_is_made_up_are_numbers_and_different_ones(
    build: Callable[[str | None], ModelRunner], cold_format: str
) -> None:
    runner = build(cold_format)
    step = MadeUpStep.of(runner, 1500)
    (entry,) = step.batch.scheduled
    assert entry.spans[0].views[0].bounds == (64, 832, 1344, 1500)
    assert runner.forward(step.batch).isfinite().all()
    assert 0 < step.median_gap_ms(3) < 5e3
    assert isinstance(runner._kv, TieredKV)
    for first, second in zip(*runner._kv.layers, strict=True):
        assert first.float().std() > 0
        assert not torch.equal(first, second)


def test_what_cannot_be_made_up_is_no_measurement(
    build: Callable[[str | None], ModelRunner],
) -> None:
    runner = build("int4")
    with pytest.raises(MeasurementFailed, match=r"90000 tokens do not fit: .* are needed"):
        MadeUpStep.of(runner, 90_000)
    with pytest.raises(MeasurementFailed, match="token 1472 begins a block"):
        MadeUpStep.of(runner, 1473)
    with pytest.raises(MeasurementFailed, match="expected a tiered cache"):
        MadeUpStep.of(build(None), 1500)


def test_sink_and_hot_run_are_the_ends_of_a_column() -> None:
    """A block of the sink, 12 cold ones, 2 warm ones, and two and a bit that are hot."""
    column = np.arange(4 + 12 + 2 * 2 + 3 * 4, dtype=np.int32)
    view = View((64, 13 * 64, 15 * 64, 17 * 64 + 5), column, column[:-1])
    assert bf16_slabs(view, Part.KEYS).tolist() == [*range(4), *range(20, 32)]
    young = View((0, 0, 0, 70), column[:8], column[:8])
    assert bf16_slabs(young, Part.VALUES).tolist() == list(range(8))


def test_what_fits_is_found_by_filling(tmp_path: Path) -> None:
    model = ModelConfig.from_folder(ONE_LAYER.write(tmp_path, 1 << 18))
    fits = {
        name: fit_of(name, model, torch.device("cpu"), num_exact=6, context=65536)
        for name in (EXACT, *LEAST_FIT)
    }
    exact = fits.pop(EXACT)
    assert exact.num_sequences == 6, "it wastes nothing"
    for name, fit in fits.items():
        assert fit.num_tokens == fit.num_sequences * 65536
        assert (fit.num_sequences + 1) / 6 > LEAST_FIT[name], "but for the rest of a sequence"
        assert 0.999 * exact.kv_bytes < fit.kv_bytes <= exact.kv_bytes
        assert fit.host_bytes == 0
    assert fits["int4"].num_sequences > fits["k8v4"].num_sequences > fits["int8"].num_sequences
