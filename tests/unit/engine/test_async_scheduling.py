"""An engine that plans a step while the last one computes gives the tokens of one that does not:
whatever comes and goes, with the recorded step of decodes and without."""

import random
import weakref
from collections.abc import Callable
from dataclasses import astuple
from itertools import count
from pathlib import Path

import pytest
import torch

from engine.build import build_engine_around, build_model_runner
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.execution.decode_graphs import DecodeGraphs, padded_sizes
from engine.execution.layer_graphs import LayerGraphs, layer_sizes
from engine.execution.recorder import Recorder, Results
from engine.execution.triton_attention import TritonAttention
from engine.ranks.group import SingleRank
from engine.sampling_params import SamplingParams
from engine.scheduling.cost_model import CostModel, num_attended
from engine.sequence import FinishReason
from engine.step_profile import paged_steps, profile_steps
from tests.unit.engine.tiny_checkpoint import save_tiny

PARAMS = (
    SamplingParams(9, temperature=0.0),
    SamplingParams(14, temperature=0.8, top_p=0.9, top_k=40, seed=7),
    SamplingParams(6, temperature=1.0, seed=3, num_logprobs=2),
    SamplingParams(12, temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(5, temperature=0.0, logit_bias=((17, 4.0),)),
    SamplingParams(40, temperature=0.0),
    SamplingParams(0),
)
LONG = (  # each is admitted with one block and grows to three
    SamplingParams(70, temperature=0.0),
    SamplingParams(70, temperature=0.9, seed=5),
    SamplingParams(70, temperature=0.0, presence_penalty=0.5),
)
CROWDS = pytest.mark.parametrize(
    ("num_blocks", "params"), [(64, PARAMS), (7, LONG)], ids=["roomy", "preempting"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


class Recompute:
    """A recorder without a GPU."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, compute: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        results = compute()

        def replay() -> None:
            self.num_replays += 1
            for kept, fresh in zip(results, compute(), strict=True):
                kept.copy_(fresh)

        return results, replay


class Forgetful:
    """As CUDA graphs do, its replays keep nothing; a result that nobody keeps loses its memory to
    another graph."""

    def __init__(self) -> None:
        self.results: list[weakref.ref[torch.Tensor]] = []

    def record(self, compute: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        results = compute()
        self.results += [weakref.ref(each) for each in results]
        return results, lambda: None


def engine_of(
    folder: Path,
    *,
    is_ahead: bool,
    num_blocks: int = 64,
    recorders: tuple[Recorder, Recorder] | None = None,
) -> Engine:
    block_bytes = 2 * 3 * 64 * 2 * 16 * 4
    config = EngineConfig(
        folder,
        attention_backend="triton",
        async_scheduling=is_ahead,
        max_model_len=192,
        cache=CacheConfig(kv_cache_bytes=num_blocks * block_bytes),
        scheduler=SchedulerConfig(max_num_sequences=5, max_num_batched_tokens=48),
        check_integrity=True,
    )
    runner = build_model_runner(config)
    if recorders is not None:
        of_decodes, of_layers = recorders
        assert isinstance(runner._backend, TritonAttention)
        assert runner._slots is not None
        runner._graphs = DecodeGraphs(runner._decoder, runner._backend, runner._slots, of_decodes)
        for size in padded_sizes(3):
            runner._graphs.record(size)
        runner._layer_graphs = LayerGraphs(runner._decoder, runner._backend, of_layers, (5, 3))
        runner._layer_graphs.record((32, 16))  # but some steps have up to 48 tokens
    return build_engine_around(runner, config)


Transcript = dict[str, tuple[list[int], FinishReason | None, list[float]]]


def transcript(
    engine: Engine, seed: int, params: tuple[SamplingParams, ...] = PARAMS
) -> Transcript:
    """What was said to sequences that arrive at random steps: tokens, reason, log probabilities."""
    choice = random.Random(seed)
    prompt_lens = (60, 64) if params is LONG else (1, 120)
    arrivals = [
        (
            choice.randrange(25),
            f"s{index}",
            choice.choices(range(199), k=choice.randrange(*prompt_lens)),
        )
        for index in range(12)
    ]
    said: Transcript = {name: ([], None, []) for _, name, _ in arrivals}
    step = 0
    while engine.has_work or step < 25:
        for at, name, prompt in arrivals:
            if at == step:
                engine.add(name, prompt, params[int(name[1:]) % len(params)])
        for output in engine.step().outputs:
            tokens, _, logprobs = said[output.seq_id]
            tokens += output.token_ids
            logprobs += [each.logprob for each in output.logprobs]
            said[output.seq_id] = tokens, output.finish_reason, logprobs
        step += 1
        assert step < 2_000
    assert engine.totals.finished_sequences == len(arrivals)
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    return said


def assert_same(ours: Transcript, theirs: Transcript) -> None:
    for name, (tokens, reason, logprobs) in theirs.items():
        assert ours[name][:2] == (tokens, reason), name
        assert ours[name][2] == pytest.approx(logprobs, abs=1e-4)


@CROWDS
def test_one_step_ahead_gives_the_same_tokens(
    folder: Path, num_blocks: int, params: tuple[SamplingParams, ...]
) -> None:
    expected = transcript(engine_of(folder, is_ahead=False, num_blocks=num_blocks), 1, params)
    ahead = engine_of(folder, is_ahead=True, num_blocks=num_blocks)
    assert_same(transcript(ahead, 1, params), expected)
    assert (ahead.totals.preemptions > 0) == (num_blocks < 64)


@CROWDS
def test_recorded_steps_give_the_same_tokens(
    folder: Path, num_blocks: int, params: tuple[SamplingParams, ...]
) -> None:
    """Decodes of 1, 2 and 3 sequences, layers of up to 16 and 32 tokens; more run unrecorded."""
    recorders = Recompute(), Recompute()
    expected = transcript(engine_of(folder, is_ahead=False, num_blocks=num_blocks), 2, params)
    ahead = engine_of(folder, is_ahead=True, num_blocks=num_blocks, recorders=recorders)
    assert_same(transcript(ahead, 2, params), expected)
    assert all(recorder.num_replays > 20 for recorder in recorders)


def test_a_recorded_step_launches_no_short_prompt_by_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = transcript(engine_of(folder, is_ahead=False), 3)
    ahead = engine_of(folder, is_ahead=True, recorders=(Recompute(), Recompute()))
    monkeypatch.setattr(TritonAttention, "attend_prompts", lambda *_: iter(()))
    assert_same(transcript(ahead, 3), expected)


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [16]), (16, [16]), (48, [64, 32, 16]), (100, [128, 96, 64, 32, 16])]
)
def test_layers_are_recorded_from_the_largest_down(most: int, sizes: list[int]) -> None:
    assert layer_sizes(most) == sizes
    assert layer_sizes(8192)[0] == 1024


def test_what_a_graph_leaves_for_another_is_kept(folder: Path) -> None:
    recorder = Forgetful()
    engine = engine_of(folder, is_ahead=True, recorders=(recorder, recorder))
    assert len(recorder.results) > 2
    assert all(result() is not None for result in recorder.results)
    assert not engine.has_work


def test_a_stop_token_found_late_ends_the_sequence_there(folder: Path) -> None:
    """The token after it was computed already: it is dropped, and neither told nor counted."""
    free = transcript(engine_of(folder, is_ahead=False), 3)["s0"][0]
    stop = SamplingParams(9, temperature=0.0, stop_token_ids=frozenset(free[4:5]))
    engine = engine_of(folder, is_ahead=True)
    tokens, reason, _ = transcript(engine, 3, (stop,))["s0"]
    assert (tokens, reason) == (free[: free.index(free[4]) + 1], FinishReason.STOP_TOKEN)


def test_outputs_come_one_step_later(folder: Path) -> None:
    engine = engine_of(folder, is_ahead=True)
    engine.add("a", [1, 2, 3], SamplingParams(2, temperature=0.0))
    assert engine.step().outputs == ()
    (first,) = engine.step().outputs
    assert first.usage.completion_tokens == 1
    (last,) = engine.step().outputs
    assert (last.usage.completion_tokens, last.finish_reason) == (2, FinishReason.LENGTH)
    assert not engine.has_work


def test_an_abort_in_flight_counts_what_was_told(folder: Path) -> None:
    engine = engine_of(folder, is_ahead=True)
    engine.add("a", [1, 2, 3], SamplingParams(50, temperature=0.0))
    told = [
        token for _ in range(4) for output in engine.step().outputs for token in output.token_ids
    ]
    usage = engine.abort("a")
    assert usage is not None
    assert usage.completion_tokens == len(told) == 3
    (last,) = engine.step().outputs
    assert (last.token_ids, last.finish_reason, last.usage) == ((), FinishReason.ABORT, usage)
    assert not engine.has_work


def test_it_needs_one_rank(folder: Path) -> None:
    with pytest.raises(EngineError, match="async_scheduling needs one rank, this engine has 2"):
        build_model_runner(EngineConfig(folder, async_scheduling=True), SingleRank(size=2))


def test_dummy_weights_need_no_file_and_say_numbers(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    config = EngineConfig(tmp_path, load_format="dummy")
    engine = build_engine_around(build_model_runner(config), config)
    engine.add("a", [1, 2, 3], SamplingParams(3, num_logprobs=1))
    logprobs = [
        each.logprob
        for _ in range(3)
        for output in engine.step().outputs
        for each in output.logprobs
    ]
    assert torch.tensor(logprobs).isfinite().all()
    assert len(logprobs) == 3


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [3, 2, 1]),
        (9, [9, 8, 4, 2, 1]),
        (64, [64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]),
    ],
)
def test_sizes_are_recorded_from_the_largest_down(most: int, sizes: list[int]) -> None:
    assert padded_sizes(most) == sizes


def test_steps_are_profiled_in_shapes_that_tell_the_costs_apart(folder: Path) -> None:
    """Through a real runner, whose pool has no more than it had before."""
    runner = build_model_runner(
        EngineConfig(folder, attention_backend="triton", async_scheduling=True, max_model_len=192)
    )
    limits = SchedulerConfig(max_num_sequences=16, max_num_batched_tokens=96)
    times = count(step=0.5)
    profile = profile_steps(
        runner, limits, 191, paged_steps(runner.block_size), clock=lambda: next(times)
    )
    shapes = [astuple(shape) for shape, _ in profile]
    assert shapes == [
        (96, num_attended(96, 0), 0),
        (48, num_attended(48, 0), 0),
        (48, num_attended(48, 143), 0),
        (6, num_attended(6, 0), 0),
        (6, num_attended(6, 185), 0),
        (0, 0, 1),
        (0, 0, 191),
        (0, 0, 16),
        (0, 0, 16 * 191),
    ]
    assert [seconds for _, seconds in profile] == [0.5] * 9
    coefficients = CostModel(profile).coefficients
    assert all(each >= 0 for each in coefficients)
