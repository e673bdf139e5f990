"""Steps with prompts over tiers, recorded layer by layer: they say, and store, what those that are
launched kernel by kernel do."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.build import build_engine_around, build_model_runner, weights_sha256
from engine.cache.calibration import BY_BITS, Calibration
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.execution.decode_attention_graphs import DecodeAttentionGraphs
from engine.execution.layer_graphs import LayerGraphs
from engine.execution.model_runner import ModelRunner
from engine.execution.recorder import Recorder
from engine.execution.tiered_attention import TieredAttention, TieredMetadata
from engine.execution.tiered_kv import TieredKV
from engine.execution.tiered_slots import TieredSlots
from engine.scheduling.batch import ScheduledBatch
from engine.sequence import Sequence
from kernels.checked_interpreter import checked
from tests.unit.engine.test_async_scheduling import Forgetful, Recompute
from tests.unit.engine.test_tiered_attention import HEADS, LAYERS, SIZE, SMALL, Steps, text
from tests.unit.engine.test_tiered_engine import transcript
from tests.unit.engine.tiered_plans import TieredPlans
from tests.unit.engine.tiny_checkpoint import SIZES, save_tiny

COLD_FORMATS = ("int4", "k8v4", "int4")  # of the layers: two groups
MOST, MAX_MODEL_LEN = 5, 640
SIZES_OF_LAYERS = (256, 64, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"max_position_embeddings": MAX_MODEL_LEN, "head_dim": 64, "num_attention_heads": 4}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setitem(SIZES, name, size)
        save_tiny(folder)
    Calibration(
        model="tiny",
        weights_sha=weights_sha256(folder),
        text_sha="none",
        num_tokens=(1,),
        tiers=SMALL,
        max_error=1.0,
        errors=dict.fromkeys(BY_BITS, (0.0,) * len(COLD_FORMATS)),
        cold_formats=COLD_FORMATS,
    ).write(folder / "calibration.json")
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        folder,
        async_scheduling=True,
        cache=CacheConfig(
            kv_cache_bytes=1 << 25, tiers=SMALL, calibration=folder / "calibration.json"
        ),
        scheduler=SchedulerConfig(max_num_sequences=MOST, max_num_batched_tokens=300),
        check_integrity=True,
    )


def runner_of(folder: Path, recorder: Recorder | None = None) -> ModelRunner:
    runner = build_model_runner(config_of(folder))
    assert len(runner.tier_groups) == 2
    if recorder is not None:
        assert isinstance(runner._backend, TieredAttention)
        shape = tables_shape(runner._slots)
        runner._layer_graphs = LayerGraphs(runner._decoder, runner._backend, recorder, shape)
        runner._layer_graphs.record(SIZES_OF_LAYERS)
    return runner


def tables_shape(slots: object) -> tuple[int, ...]:
    assert isinstance(slots, TieredSlots)
    return MOST, *(each.shape[1] for group in slots.tables for each in group)


class Story:
    """Sequences that are prompted and answer by a plan, the same for every runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.logits: list[torch.Tensor] = []
        self.batches: list[ScheduledBatch] = []
        self._runner = runner
        self._plans = TieredPlans(runner.tier_groups)

    def open(self, num_tokens: int, seed: int) -> Sequence:
        return self._plans.open(text(num_tokens, seed))

    @torch.inference_mode()
    def step(self, *chunks: tuple[Sequence, int]) -> None:
        for sequence, _ in chunks:
            if sequence.num_uncomputed_tokens == 0:
                sequence.token_ids.append(7 * len(sequence.token_ids) % 199)
        batch = self._plans.plan(*chunks)
        self.logits.append(self._runner.forward(batch))
        self._plans.book(batch)
        self.batches.append(batch)


def tell(runner: ModelRunner) -> Story:
    story = Story(runner)
    first, second, third = story.open(500, 1), story.open(90, 2), story.open(330, 3)
    story.step((first, 250))
    story.step((first, 250), (second, 6))  # some of what it stores it demotes, too
    story.step((second, 84), (first, 1))
    for num_tokens in (1, 15, 200, 114):  # a prompt's single token is no decode
        story.step((third, num_tokens), (first, 1), (second, 1))
    fourth = story.open(400, 4)
    story.step((fourth, 299), (first, 1))  # more than is recorded
    for _ in range(70):  # until blocks of the answers age, too
        story.step((first, 1), (second, 1), (third, 1))
    story.step((fourth, 101), (third, 1), (first, 1), (second, 1))
    story.step((story.open(40, 5), 40), (fourth, 1), (third, 1), (first, 1), (second, 1))
    return story


def stored(runner: ModelRunner) -> list[torch.Tensor]:
    assert isinstance(runner._kv, TieredKV)
    return [each for slabs in runner._kv.whole for each in slabs]


def test_it_says_and_stores_the_same(folder: Path) -> None:
    recorder = Recompute()
    plain, recorded = runner_of(folder), runner_of(folder, recorder)
    expected, came = tell(plain), tell(recorded)
    for ours, theirs in zip(came.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, stored(recorded), stored(plain)))

    fitting = [batch for batch in came.batches if batch.num_batched_tokens <= SIZES_OF_LAYERS[0]]
    assert len(fitting) == len(came.batches) - 1
    demoting = [batch for batch in fitting if any(batch.demotions)]
    have_prompts = [num_decodes(batch) < len(batch.scheduled) for batch in demoting]
    assert have_prompts.count(True) > 4
    assert have_prompts.count(False) > 0
    num_layers = len(COLD_FORMATS)
    num_with_decodes = sum(num_decodes(batch) > 0 for batch in fitting)
    plans_too = num_layers + 1
    assert recorder.num_replays == num_layers * len(fitting) + plans_too * num_with_decodes


def num_decodes(batch: ScheduledBatch) -> int:
    return sum(entry.spans[0].is_decode for entry in batch.scheduled)


def test_an_engine_with_recorded_layers_says_the_same(folder: Path) -> None:
    recorder = Recompute()
    engines = [
        build_engine_around(runner_of(folder, each), config_of(folder)) for each in (None, recorder)
    ]
    expected, came = (transcript(engine, 5) for engine in engines)
    assert came == expected
    assert recorder.num_replays > 100


def test_what_a_graph_leaves_is_kept_and_plans_are_none_of_it(folder: Path) -> None:
    recorder = Forgetful()
    runner = runner_of(folder, recorder)
    assert runner._layer_graphs is not None
    assert len(recorder.results) == 3 * len(SIZES_OF_LAYERS)  # turns and residual
    assert all(result() is not None for result in recorder.results)


@pytest.mark.parametrize("deterministic", [False, True])
def test_recorded_decodes_attend_as_others_do(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels, checked: in each step there are other sequences."""

    def attended(*, is_recorded: bool) -> list[torch.Tensor]:
        steps = Steps(SMALL, dtype=torch.bfloat16, deterministic=deterministic)
        first, second, third = (steps.open(text(num, seed=num)) for num in (280, 50, 300))
        for sequence in (first, second, third):
            steps.prefill(sequence, [sequence.num_tokens])
        with checked():
            if is_recorded:
                monkeypatch.setattr(steps.backend, "attend", recorded_attend(steps, 4))
            for beside in ((first, second, third), (third, second)):
                for sequence in beside:
                    sequence.token_ids.append(7)
                steps.step(*((sequence, 1) for sequence in beside))
        return [torch.cat(each) for of_layers in steps.attended.values() for each in of_layers]

    for came, right in zip(attended(is_recorded=True), attended(is_recorded=False), strict=True):
        assert (came - right).double().norm() < 0.01 * right.double().norm()
        assert torch.equal(came, right) or not deterministic


def recorded_attend(steps: Steps, size: int) -> Callable[..., torch.Tensor]:
    """As that of `steps.backend`, of `size` sequences that decode, at most."""
    backend = steps.backend
    query = torch.zeros(2 * size, HEADS, SIZE, dtype=steps.dtype)
    attended = torch.full_like(query, 7.0)
    configs = [group.config for group in steps.kv.groups]
    slots = TieredSlots(MOST, configs, MAX_MODEL_LEN, steps.kv.device)
    graphs = DecodeAttentionGraphs(backend, Recompute(), query, attended, tables_shape(slots))
    graphs.record(size, len(LAYERS))
    attends: list[Callable[[], None]] = []

    def attend(layer: int, *given: torch.Tensor, metadata: TieredMetadata) -> torch.Tensor:
        num_tokens = len(given[0])
        backend.append(layer, *given, backend.token_rows(metadata), query[:num_tokens])
        backend.begin_layer(layer, metadata)
        if layer == 0:
            attends[:] = graphs.place(backend.decodes_of(metadata))
        attends[layer]()
        assert not attended[num_tokens:size].any(), "a row that is nobody's"
        assert (attended[size:] == 7.0).all(), "a row of prompts"
        return attended[:num_tokens].clone()

    return lambda layer, *given: attend(layer, *given[:-1], metadata=given[-1])
