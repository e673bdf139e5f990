"""The soak finds what it is for: an engine that leaks, stalls, errs, or says wrong things."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from benchmarks.results import Row
from benchmarks.soak.bars import rows_of
from benchmarks.soak.command import config_of, limits_of, write
from benchmarks.soak.load import Load, Requests
from benchmarks.soak.soak import NUM_LULLS, Outcome, Soak
from benchmarks.soak.watch import MemoryWatch, StepTimes, kind_of
from deployments.errors import ModelFilesError
from engine.cache.formats import BLOCK_SIZE
from engine.engine import EngineTotals
from engine.errors import IntegrityError
from engine.outputs import SequenceOutput, StepOutput, StepStats, TokenLogprobs, Usage
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason

LOAD = Load(max_model_len=64, vocab_size=300, max_live=8, max_new_tokens=8)
SECONDS = 120.0
STEP_S = 0.05
NUM_BLOCKS = 10


IDLE = StepStats(0, 0, 0, 0, 0, NUM_BLOCKS, NUM_BLOCKS, 0.0)


@dataclass(slots=True)
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Asked:
    params: SamplingParams
    usage: Usage


@dataclass(slots=True)
class FakeEngine:
    """Gives every sequence a token a step, at once. `disturb` may change what a step says."""

    clock: Clock
    disturb: "Disturbance" = lambda _engine, output: output
    totals: EngineTotals = field(default_factory=lambda: EngineTotals(preemptions=1))
    stats: StepStats = IDLE
    num_steps: int = 0
    _running: dict[str, Asked] = field(default_factory=dict)
    _aborted: list[SequenceOutput] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._aborted)

    def add(
        self, seq_id: str, prompt: list[int], params: SamplingParams, *, cache_salt: bytes
    ) -> None:
        self._running[seq_id] = Asked(params, Usage(len(prompt), min(1, len(prompt) - 1), 0))

    def abort(self, seq_id: str) -> Usage | None:
        asked = self._running.pop(seq_id, None)
        if asked is None:
            return None
        self._aborted.append(SequenceOutput(seq_id, (), (), FinishReason.ABORT, asked.usage))
        return asked.usage

    def step(self) -> StepOutput:
        self.num_steps += 1
        self.clock.now_s += STEP_S
        outputs, self._aborted = self._aborted, []
        num_decodes = len(self._running)
        outputs += [self._token(seq_id, asked) for seq_id, asked in self._running.items()]
        for output in outputs:
            if output.finish_reason is not None:
                self._running.pop(output.seq_id, None)
                self.totals = self.totals.plus_final(output.usage)
        num_free = NUM_BLOCKS if not self._running else NUM_BLOCKS - 1
        self.stats = StepStats(0, num_decodes, 0, num_decodes, 0, num_free, NUM_BLOCKS, 50.0)
        said = self.disturb(self, StepOutput(tuple(outputs), self.stats))
        self.stats = said.stats
        return said

    def _token(self, seq_id: str, asked: Asked) -> SequenceOutput:
        params = asked.params
        if params.max_tokens == 0:
            return SequenceOutput(seq_id, (), (), FinishReason.LENGTH, asked.usage)
        num_told = asked.usage.completion_tokens + 1
        asked.usage = replace(asked.usage, completion_tokens=num_told)
        token_id, reason = 5, None
        if num_told == 1 and params.stop_token_ids:
            token_id, reason = min(params.stop_token_ids), FinishReason.STOP_TOKEN
        elif num_told == params.max_tokens:
            reason = FinishReason.LENGTH
        logprobs = () if params.num_logprobs is None else (TokenLogprobs(-1.0),)
        return SequenceOutput(seq_id, (token_id,), logprobs, reason, asked.usage)


Disturbance = Callable[[FakeEngine, StepOutput], StepOutput]


def soak(
    disturb: Disturbance | None = None,
    bytes_at: Callable[[float], float] = lambda now_s: 1e9,
    lag: int = 0,
) -> tuple[dict[str, Row], Outcome]:
    clock = Clock()
    engine = FakeEngine(clock, disturb) if disturb else FakeEngine(clock)
    watched = lambda: {"rss": bytes_at(clock.now_s)}  # noqa: E731
    outcome = Soak(
        engine, LOAD, watched, SECONDS, lag=lag, clock=clock, cpu_clock=clock, lengths=(1, 9)
    ).run()
    return {row.case: row for row in rows_of(outcome, "cpu")}, outcome


def missed(rows: dict[str, Row]) -> set[str]:
    return {case for case, row in rows.items() if row.meets_floor is False}


def test_a_sound_engine_meets_every_bar() -> None:
    lines: list[str] = []
    rows, outcome = soak()
    assert missed(rows) == set(), outcome.ledger.shown
    assert rows["requests"].ours > 200
    assert set(outcome.ledger.ended) == {"length", "abort", "stop_token"}
    clock = Clock()
    Soak(FakeEngine(clock), LOAD, dict, 45.0, lag=0, clock=clock, progress=lines.append).run()
    assert len(lines) == 4


def at_step(number: int, change: Callable[[StepOutput], StepOutput]) -> Disturbance:
    """A disturbance of the first step from `number` on that says something."""
    done: list[int] = []

    def disturb(engine: FakeEngine, output: StepOutput) -> StepOutput:
        if engine.num_steps < number or not output.outputs or done:
            return output
        done.append(engine.num_steps)
        return change(output)

    return disturb


def twice(output: StepOutput) -> StepOutput:
    """The end of a sequence, said again."""
    ends = [each for each in output.outputs if each.finish_reason is not None]
    return replace(output, outputs=(*output.outputs, *ends, ended("soak-0")))


def ended(seq_id: str) -> SequenceOutput:
    return SequenceOutput(seq_id, (), (), FinishReason.LENGTH, Usage(1, 0, 0))


def never(output: StepOutput) -> StepOutput:
    return replace(output, outputs=())


def no_number(output: StepOutput) -> StepOutput:
    return replace(
        output,
        outputs=tuple(
            replace(each, logprobs=(TokenLogprobs(float("nan")),) * len(each.token_ids))
            for each in output.outputs
        ),
    )


def a_token_more(output: StepOutput) -> StepOutput:
    first, *rest = output.outputs
    told = replace(first, token_ids=(*first.token_ids, 7))
    return replace(output, outputs=(told, *rest))


@pytest.mark.parametrize(
    ("change", "case"),
    [
        (twice, "wrong_ends"),
        (never, "wrong_totals"),
        (no_number, "wrong_ends"),
        (a_token_more, "wrong_totals"),
    ],
)
def test_what_is_said_wrongly_is_counted(
    change: Callable[[StepOutput], StepOutput], case: str
) -> None:
    rows, outcome = soak(at_step(100, change))
    assert case in missed(rows)
    assert outcome.ledger.shown


def test_a_request_that_never_ends_is_counted() -> None:
    def forget(output: StepOutput) -> StepOutput:
        kept = tuple(each for each in output.outputs if each.finish_reason is None)
        return replace(output, outputs=kept)

    rows, outcome = soak(lambda engine, said: forget(said) if engine.num_steps > 2390 else said)
    assert {"wrong_ends", "wrong_totals"} <= missed(rows)
    assert any("never ended" in words for words in outcome.ledger.shown)
    many, outcome = soak(lambda engine, said: forget(said) if engine.num_steps > 50 else said)
    assert many["wrong_ends"].ours > 20
    assert len(outcome.ledger.shown) == 20


def test_the_last_lull_ends_with_the_time() -> None:
    """Its requests would take as long again: they are aborted, and nothing is missed for it."""

    def dawdle(engine: FakeEngine, said: StepOutput) -> StepOutput:
        if engine.clock.now_s > 0.85 * SECONDS:
            engine.clock.now_s += 100 * STEP_S
        return said

    rows, outcome = soak(dawdle)
    assert missed(rows) <= {"worst_step", "worst_step_cpu"}, outcome.ledger.shown
    assert 0 < rows["rests"].ours < NUM_LULLS
    assert outcome.seconds < 1.2 * SECONDS


def test_broken_books_end_the_soak() -> None:
    def contradict(engine: FakeEngine, output: StepOutput) -> StepOutput:
        if engine.num_steps == 90:
            raise IntegrityError("block 3 counts 2 references, tables hold 1")
        return output

    rows, outcome = soak(contradict)
    assert rows["integrity_errors"].ours == 1
    assert outcome.num_steps == 89 - 2  # of the lengths
    assert outcome.ledger.shown == ["block 3 counts 2 references, tables hold 1"]


def test_any_other_error_is_counted_too() -> None:
    def fail(engine: FakeEngine, output: StepOutput) -> StepOutput:
        if engine.num_steps == 90:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return output

    rows, _ = soak(fail)
    assert rows["step_errors"].meets_floor is False


def test_blocks_that_an_idle_engine_keeps_are_lost() -> None:
    def keep_one(engine: FakeEngine, output: StepOutput) -> StepOutput:
        if engine.num_steps < 300:
            return output
        stats = replace(output.stats, num_free_blocks=output.stats.num_free_blocks - 1)
        return replace(output, stats=stats)

    rows, _ = soak(keep_one)
    assert missed(rows) == {"lost_blocks"}


def test_memory_that_grows_after_the_warm_up_misses_its_bar() -> None:
    slowly, _ = soak(bytes_at=lambda now_s: 1e9 * (1 + 0.03 * now_s / SECONDS))
    assert missed(slowly) == {"growth_rss"}
    assert 1.9 < slowly["growth_rss"].ours < 2.1
    early, _ = soak(bytes_at=lambda now_s: 1e9 * min(1.5, 1 + now_s / 20))
    assert missed(early) == set()
    noise = random.Random(0)
    noisy, _ = soak(bytes_at=lambda now_s: 1e9 * noise.uniform(0.98, 1.02))
    assert missed(noisy) == set()


def test_one_stalled_step_misses_its_bar() -> None:
    def stall_at(number: int) -> Disturbance:
        def stall(engine: FakeEngine, output: StepOutput) -> StepOutput:
            if engine.num_steps == number:
                engine.clock.now_s += 10 * STEP_S
            return output

        return stall

    rows, outcome = soak(stall_at(800))
    assert missed(rows) == {"worst_step", "worst_step_cpu"}
    assert rows["worst_step"].ours == rows["worst_step_cpu"].ours == pytest.approx(11)
    on_a_gpu = {row.case: row for row in rows_of(outcome, "cuda:0")}
    assert missed(on_a_gpu) == {"worst_step"}
    assert "worst_step_cpu" not in on_a_gpu
    assert missed(soak(stall_at(100))[0]) == set(), "it was within the warm-up"


def test_what_others_took_of_a_machine_is_told_from_what_a_step_did() -> None:
    clock = Clock()

    def wall_clock() -> float:
        """In one step the others take the time of ten."""
        return clock.now_s + (10 * STEP_S if clock.now_s > SECONDS / 2 else 0.0)

    probe = lambda: {"rss": 1e9}  # noqa: E731
    outcome = Soak(
        FakeEngine(clock), LOAD, probe, SECONDS, lag=0, clock=wall_clock, cpu_clock=clock
    ).run()
    rows = {row.case: row for row in rows_of(outcome, "cpu")}

    assert rows["worst_step"].ours > 10
    assert rows["worst_step_cpu"].ours == pytest.approx(1)
    assert missed(rows) == {"worst_step"}


def stats(num_prefill: int, num_decode: int) -> StepStats:
    return StepStats(num_prefill, num_decode, 0, 0, 0, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "kind"),
    [
        (0, 0, None),
        (0, 9, "decode"),
        (1, 9, "prefill 1"),
        (128, 0, "prefill 128"),
        (129, 0, "prefill 256"),
    ],
)
def test_steps_are_told_apart_by_what_they_compute(
    num_prefill: int, num_decode: int, kind: str | None
) -> None:
    assert kind_of(stats(num_prefill, num_decode)) == kind


def test_a_step_in_flight_is_timed_by_the_next() -> None:
    """Each says what it planned, and the time of the one before."""
    times = StepTimes(lag=1)
    for _ in range(30):
        times.note(stats(0, 4), 900.0)
        times.note(stats(512, 4), 10.0)
    (prefills, decodes) = sorted(times.kinds, key=lambda each: -each.median_ms)
    assert (prefills.kind, prefills.worst_ms) == ("prefill 512", 900.0)
    assert (decodes.kind, decodes.worst_ms) == ("decode", 10.0)


def test_only_the_time_after_the_warm_up_is_watched() -> None:
    memory = MemoryWatch(lambda: {"rss": 7.0}, 10.0, 20.0)
    memory.look(9.9)
    memory.look(20.0)
    assert memory.growth_percent() == {}
    assert memory.last == {"rss": 7.0}


def test_requests_are_of_every_kind_and_fit() -> None:
    made = [Requests(LOAD, seed=3) for _ in range(2)]
    first, second = ([requests.next() for _ in range(400)] for requests in made)
    assert first == second
    assert {len(each.prompt) for each in first} >= {1, LOAD.max_model_len // 2}
    assert all(len(each.prompt) + each.params.max_tokens <= 64 for each in first)
    assert {0, LOAD.max_new_tokens} <= {each.params.max_tokens for each in first}
    assert {each.params.is_greedy for each in first} == {True, False}
    assert any(each.params.has_penalties for each in first)
    heads = [tuple(each.prompt[:8]) for each in first if len(each.prompt) > 8]
    assert len(set(heads)) < len(heads)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_the_pool_is_smaller_than_what_may_run(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModelFilesError("the built-in model is not installed")

    monkeypatch.setattr("benchmarks.soak.command.prepare_model", missing)
    config, limits = config_of(device, tmp_path), limits_of(device)
    assert config.load_format == "dummy"
    assert (config.model_path / "config.json").exists()
    num_blocks = limits.max_model_len // BLOCK_SIZE + 1  # of one sequence
    assert num_blocks <= limits.num_blocks < config.scheduler.max_num_sequences * num_blocks
    assert limits.max_new_tokens > 2 * BLOCK_SIZE
    assert config.check_integrity
    assert (config.scheduler.itl_budget_ms is None) == (device == "cpu")


def test_the_file_says_what_was_seen(tmp_path: Path) -> None:
    rows, outcome = soak()
    file = tmp_path / "results" / "soak.json"
    write(file, "cpu", "abc+dirty", "python -m benchmarks.soak", list(rows.values()), outcome)
    content = json.loads(file.read_text())
    assert content["sha"] == "abc+dirty"
    assert [row["case"] for row in content["rows"]] == list(rows)
    assert set(content["ended"]) == {"length", "abort", "stop_token"}
    assert content["faults"] == []
    for times in (content["step_ms"], content["step_cpu_ms"]):
        assert times["decode"]["median"] == pytest.approx(1e3 * STEP_S)
