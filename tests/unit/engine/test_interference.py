"""What a fresh 128K prompt does to 16 running streams and to the short prompts behind it, on a fake
GPU with the measured costs of an 8B model on an H200."""

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from engine.cache.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.scheduling import budget
from engine.scheduling.cost_model import CostModel
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from tests.fakes.timed_gpu import GpuCosts, TimedGpu

BLOCK_SIZE = 64
CONTEXT = 133_120
NUM_STREAMS = 16
STREAM_PROMPT, LONG_PROMPT, SHORT_PROMPT = 1_024, 131_072, 200
SHORT_PERIOD_S = 0.5
QUIET_S = 0.5
H200 = GpuCosts()


class Stage:
    """An engine on a fake GPU, and when each token came."""

    def __init__(self, itl_budget_ms, *, costs=H200, num_batched_tokens=2_048, noise=0.02):
        rng = random.Random(0)
        self.gpu = TimedGpu(costs, lambda: max(0.5, rng.gauss(1.0, noise)))
        scheduler = Scheduler(
            SchedulerConfig(64, num_batched_tokens, itl_budget_ms),
            PagedSpace(
                BlockAllocator(4 * CONTEXT // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_cache=False),
                b"model",
            ),
            CONTEXT,
        )
        self.engine = Engine(scheduler, self.gpu, vocab_size=1, clock=self.gpu.clock)
        self.arrival_s = {}
        self.token_times_s = defaultdict(list)

    @property
    def now_s(self):
        return self.gpu.now_s

    def add(self, name, num_tokens, max_tokens, arrival_s=None):
        """It may have come while the last step was running."""
        self.arrival_s[name] = self.now_s if arrival_s is None else arrival_s
        self.engine.add(name, [0] * num_tokens, SamplingParams(max_tokens))

    def start_streams(self, num_streams):
        self.streams = [f"stream{index}" for index in range(num_streams)]
        for name in self.streams:
            self.add(name, STREAM_PROMPT, CONTEXT // 2)
        while self.now_s < QUIET_S or len(self.token_times_s) < num_streams:
            self.step()

    def step(self):
        for output in self.engine.step().outputs:
            self.token_times_s[output.seq_id] += [self.now_s] * len(output.token_ids)

    def ttft_s(self, name):
        return self.token_times_s[name][0] - self.arrival_s[name]

    def gaps_s(self, since_s, until_s):
        return [
            later - earlier
            for name in self.streams
            for earlier, later in pairwise(self.token_times_s[name])
            if since_s < later <= until_s
        ]


@dataclass(frozen=True)
class Interference:
    """Of the time from the long prompt's arrival to its first token."""

    itl_p99_s: float
    short_ttft_p95_s: float
    long_ttft_s: float


def interfere(itl_budget_ms, **options):
    stage = Stage(itl_budget_ms, **options)
    stage.start_streams(NUM_STREAMS)
    stage.add("long", LONG_PROMPT, 1)
    shorts, next_short_s = [], stage.now_s + SHORT_PERIOD_S
    while "long" not in stage.token_times_s:
        stage.step()
        if stage.now_s >= next_short_s:
            shorts.append(f"short{len(shorts)}")
            stage.add(shorts[-1], SHORT_PROMPT, 16, next_short_s)
            next_short_s += SHORT_PERIOD_S
    ended_s = stage.now_s
    while any(name not in stage.token_times_s for name in shorts):
        stage.step()
    return Interference(
        quantile(stage.gaps_s(stage.arrival_s["long"], ended_s), 0.99),
        quantile([stage.ttft_s(name) for name in shorts], 0.95),
        stage.ttft_s("long"),
    )


def quantile(values, share):
    return sorted(values)[int(share * len(values))]


@pytest.fixture(scope="module")
def unbudgeted():
    return interfere(None)


def test_a_fixed_chunk_makes_everybody_wait(unbudgeted):
    assert unbudgeted.itl_p99_s > 0.25
    assert unbudgeted.short_ttft_p95_s > 0.5


def test_a_time_budget_keeps_the_streams_going_and_lets_short_prompts_pass(unbudgeted):
    budgeted = interfere(50.0)
    assert budgeted.itl_p99_s <= 0.050
    assert budgeted.short_ttft_p95_s <= 0.100
    assert budgeted.long_ttft_s <= 1.2 * unbudgeted.long_ttft_s


def test_a_larger_token_budget_changes_nothing_in_it():
    assert interfere(50.0, num_batched_tokens=8_192).itl_p99_s <= 0.050
    assert interfere(None, num_batched_tokens=8_192).itl_p99_s > 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"noise": 0.1},
        {"costs": replace(H200, per_attended=4 * H200.per_attended)},
        {"costs": replace(H200, per_prefill_token=4 * H200.per_prefill_token)},
        {"costs": replace(H200, per_step=1e-3, per_decode_context=0.0)},
    ],
)
def test_the_budget_holds_on_devices_that_nobody_measured(options):
    assert interfere(50.0, **options).itl_p99_s <= 0.050


def flood_until(stage, name, max_s):
    """Short prompts, more than can be served, until `name` has its first token."""
    shorts = []
    while name not in stage.token_times_s and stage.now_s < max_s:
        for _ in range(8):
            shorts.append(f"short{len(shorts)}")
            stage.add(shorts[-1], SHORT_PROMPT, 1)
        stage.step()
    return shorts


@pytest.mark.parametrize("aging", [budget.AGING, 0.0])
def test_a_flood_of_short_prompts_starves_nobody(aging, monkeypatch):
    """The oldest has its half. One behind it that needs R seconds is passed, in the other half,
    only by what comes within R / AGING after it; without aging, by the whole flood."""
    monkeypatch.setattr(budget, "AGING", aging)
    stage = Stage(50.0)
    stage.start_streams(2)
    stage.add("oldest", LONG_PROMPT, 1)
    stage.step()
    stage.add("second", 2_048, 1)
    needed_s = CostModel().predict_chunk(2_048, 0)
    shorts = flood_until(stage, "second", stage.now_s + 5.0)
    assert ("second" in stage.token_times_s) is (aging > 0)
    if aging > 0:
        passing = [name for name in shorts if name in stage.token_times_s]
        last_s = max(stage.arrival_s[name] for name in passing) - stage.arrival_s["second"]
        assert 0.5 * needed_s / aging < last_s < 1.1 * needed_s / aging


def test_the_oldest_gets_half_of_the_time_whatever_comes():
    alone, flooded = Stage(50.0), Stage(50.0)
    for stage in (alone, flooded):
        stage.start_streams(2)
        stage.add("oldest", LONG_PROMPT // 4, 1)
    while "oldest" not in alone.token_times_s:
        alone.step()
    flood_until(flooded, "oldest", 60.0)
    assert flooded.ttft_s("oldest") <= 2.5 * alone.ttft_s("oldest")
