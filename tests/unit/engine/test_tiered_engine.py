"""A whole engine over a tiered cache, on a CPU: planned ahead, recorded or short of room, it says
what the plain loop says."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine_around, build_model_runner
from engine.cache.tier_config import TierConfig
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.decode_graphs import DecodeGraphs
from engine.execution.tiered_attention import TieredAttention
from engine.outputs import SkipCounts
from engine.sampling_params import SamplingParams
from tests.unit.engine.test_async_scheduling import Forgetful, Recompute
from tests.unit.engine.tiny_checkpoint import SIZES, save_tiny

TIERS = TierConfig(sink_tokens=64, hot_tokens=64, warm_tokens=64, cell_tokens=128)
NUM_SEQUENCES = 8
PARAMS = (
    SamplingParams(75, temperature=0.0),
    SamplingParams(40, temperature=0.8, top_p=0.9, seed=7),
    SamplingParams(70, temperature=0.0, repetition_penalty=1.2),
    SamplingParams(0),
)
LONG = (  # each is admitted with a block or two, and grows to five
    SamplingParams(230, temperature=0.0),
    SamplingParams(200, temperature=0.8, seed=3),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (
            ("max_position_embeddings", 512),
            ("head_dim", 64),
            ("num_attention_heads", 4),
        ):
            patch.setitem(SIZES, name, size)
        save_tiny(folder)
    return folder


def engine_of(
    folder: Path,
    *,
    is_ahead: bool = False,
    kv_cache_bytes: int = 1 << 26,
    recorder: Recompute | Forgetful | None = None,
    skip_epsilon: float = 0.0,
    **changes: Any,
) -> Engine:
    config = EngineConfig(
        folder,
        async_scheduling=is_ahead,
        cache=CacheConfig(
            kv_cache_bytes=kv_cache_bytes, tiers=replace(TIERS, skip_epsilon=skip_epsilon)
        ),
        scheduler=SchedulerConfig(max_num_sequences=5, max_num_batched_tokens=300),
        check_integrity=True,
        **changes,
    )
    runner = build_model_runner(config)
    if recorder is not None:
        assert isinstance(runner._backend, TieredAttention)
        assert runner._slots is not None
        graphs = DecodeGraphs(runner._decoder, runner._backend, runner._slots, recorder)
        for size in (4, 2, 1):  # of more sequences, and of 3, a step is padded or not recorded
            graphs.record(size)
        runner._graphs = graphs
    return build_engine_around(runner, config)


def transcript(
    engine: Engine, seed: int, params: tuple[SamplingParams, ...] = PARAMS
) -> dict[str, list[int]]:
    """What was said to sequences that arrive at random steps, some with the same beginning."""
    choice = random.Random(seed)
    common = choice.choices(range(199), k=250)
    lens = (30, 60) if params is LONG else (1, 320)
    arrivals = []
    for index in range(NUM_SEQUENCES):
        prompt = choice.choices(range(199), k=choice.randrange(*lens))
        if index % 3 == 0 and params is not LONG:
            prompt[:250] = common
        arrivals.append((choice.randrange(40), f"s{index}", prompt))
    said: dict[str, list[int]] = {name: [] for _, name, _ in arrivals}
    step = 0
    while engine.has_work or step < 40:
        for at, name, prompt in arrivals:
            if at == step:
                engine.add(name, prompt, params[int(name[1:]) % len(params)])
        for output in engine.step().outputs:
            said[output.seq_id] += output.token_ids
        step += 1
        assert step < 2_000
    assert engine.totals.finished_sequences == NUM_SEQUENCES
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    return said


def test_one_step_ahead_gives_the_same_tokens(folder: Path) -> None:
    expected = transcript(engine_of(folder), 1)
    assert transcript(engine_of(folder, is_ahead=True), 1) == expected
    assert [len(expected[f"s{index}"]) for index in range(4)] == [75, 40, 70, 0]


def test_recorded_decodes_give_the_same_tokens(folder: Path) -> None:
    recorder = Recompute()
    expected = transcript(engine_of(folder), 2)
    assert transcript(engine_of(folder, is_ahead=True, recorder=recorder), 2) == expected
    assert recorder.num_replays > 50


def test_a_prompt_of_which_all_but_a_token_is_cached_is_no_decode(folder: Path) -> None:
    recorder = Recompute()
    engine = engine_of(folder, is_ahead=True, recorder=recorder)
    prompt = random.Random(4).choices(range(199), k=129)
    said = []
    for name in ("first", "second"):
        engine.add(name, prompt, SamplingParams(5, temperature=0.0))
        said.append([])
        while engine.has_work:
            for output in engine.step().outputs:
                said[-1] += output.token_ids
    assert engine.totals.cached_tokens == 128
    assert said[0] == said[1]
    assert recorder.num_replays == 2 * 4


def test_without_room_for_all_the_tokens_are_the_same(folder: Path) -> None:
    """What a preempted sequence had decoded is stored again as it was."""
    expected = transcript(engine_of(folder, deterministic=True), 3, LONG)
    crowded = engine_of(folder, deterministic=True, is_ahead=True, kv_cache_bytes=1_200_000)
    assert transcript(crowded, 3, LONG) == expected
    assert crowded.totals.preemptions > 0


def test_of_next_to_nothing_that_is_skipped_the_tokens_are_the_same(folder: Path) -> None:
    skipping = engine_of(folder, is_ahead=True, skip_epsilon=1e-12)
    assert transcript(skipping, 1) == transcript(engine_of(folder), 1)
    assert skipping.skipped.read_blocks == skipping.skipped.cold_blocks > 0
    assert engine_of(folder).skipped == SkipCounts()


def test_recorded_decodes_skip_what_others_skip(folder: Path) -> None:
    recorder = Recompute()
    plain = engine_of(folder, skip_epsilon=0.3)
    recorded = engine_of(folder, is_ahead=True, recorder=recorder, skip_epsilon=0.3)
    assert transcript(recorded, 2) == transcript(plain, 2)
    assert recorder.num_replays > 50
    counts = recorded.skipped
    assert counts.read_blocks < 0.9 * counts.cold_blocks
    assert 0 < counts.greatest_certificate <= 0.3


def test_sequences_that_are_preempted_skip_anew(folder: Path) -> None:
    crowded = engine_of(folder, is_ahead=True, kv_cache_bytes=1_200_000, skip_epsilon=0.3)
    said = transcript(crowded, 3, LONG)
    assert {len(each) for each in said.values()} == {200, 230}
    assert crowded.totals.preemptions > 0
    assert 0 < crowded.skipped.greatest_certificate <= 0.3


def test_what_a_graph_leaves_is_kept(folder: Path) -> None:
    recorder = Forgetful()
    engine = engine_of(folder, is_ahead=True, recorder=recorder)
    assert len(recorder.results) == 6
    assert all(result() is not None for result in recorder.results)
    assert not engine.has_work
