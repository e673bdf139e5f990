"""Who gets room in a cache that ages, who waits for it, and what a sequence begins with."""

from itertools import pairwise

import pytest

from engine.cache.formats import COLD_FORMATS, Part
from engine.cache.kv_arenas import KvArenas
from engine.cache.tier_config import TierConfig
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.errors import CacheTooSmall, IntegrityError
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.tenure import ArenaGroup
from engine.scheduling.tiered_space import TieredSpace, num_slabs_needed
from engine.sequence import FinishReason, Sequence
from tests.fakes.executor import expected_completion
from tests.fakes.tiered_executor import TieredFakeExecutor

CONFIG = TierConfig(
    cold_format="int4", sink_tokens=4, hot_tokens=4, warm_tokens=4, cell_tokens=8, block_size=4
)
VOCAB_SIZE = 97


class Bench:
    def __init__(
        self,
        num_slabs=200,
        *,
        ahead=0,
        max_num_batched_tokens=64,
        context=64,
        config=CONFIG,
        **options,
    ):
        arenas = KvArenas.create(num_slabs, num_slabs, config)
        self.group = ArenaGroup(config, arenas, b"version")
        self.space = TieredSpace([self.group], b"model", **options)
        config = SchedulerConfig(8, max_num_batched_tokens)
        self.scheduler = Scheduler(config, self.space, context)
        self.executor = TieredFakeExecutor([self.group], vocab_size=VOCAB_SIZE)
        self.engine = Engine(
            self.scheduler,
            self.executor,
            vocab_size=VOCAB_SIZE,
            launch=self.executor.launch if ahead else None,
            check_integrity=True,
        )
        self.tokens = {}
        self.finals = {}

    def add(self, seq_id, prompt, max_tokens, **options):
        self.engine.add(seq_id, prompt, SamplingParams(max_tokens), **options)

    def step(self):
        for output in self.engine.step().outputs:
            self.tokens.setdefault(output.seq_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.finals[output.seq_id] = output

    def drain(self, max_steps=2_000):
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("no end")

    def entry(self, seq_id):
        (entry,) = [e for e in self.executor.batches[-1].scheduled if e.sequence.seq_id == seq_id]
        return entry


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("max_num_batched_tokens", [8, 64])
def test_tokens_are_those_of_the_model_whatever_their_kv_is_stored_as(
    ahead, max_num_batched_tokens
):
    bench = Bench(ahead=ahead, max_num_batched_tokens=max_num_batched_tokens)
    prompts = {f"s{index}": list(range(index, 3 + 7 * index)) for index in range(6)}
    for seq_id, prompt in prompts.items():
        bench.add(seq_id, prompt, 20)
    bench.drain()
    for seq_id, prompt in prompts.items():
        assert bench.tokens[seq_id] == expected_completion(prompt, 20, VOCAB_SIZE)


def test_a_chunk_is_told_cell_by_cell():
    bench = Bench()
    bench.add("a", range(29), 1)
    bench.step()
    spans = bench.entry("a").spans
    assert [(span.start, span.end) for span in spans] == [(0, 8), (8, 16), (16, 24), (24, 29)]
    assert [span.views[0].bounds for span in spans] == [
        (4, 4, 4, 8),
        (4, 4, 4, 16),
        (4, 8, 8, 24),
        (4, 16, 16, 29),
    ]
    assert not any(span.is_decode for span in spans)
    assert len(bench.executor.batches[-1].demotions[0]) == 4  # two moves, of keys and of values


def test_a_decode_step_names_the_same_arrays_until_the_table_changes():
    bench = Bench()
    bench.add("a", range(21), 9)
    views = []
    for _ in range(6):
        bench.step()
        views.append(bench.entry("a").spans[-1].views[0])
    of_decodes = views[1:]
    positions = [view.bounds[3] - 1 for view in of_decodes]
    assert positions == [21, 22, 23, 24, 25]
    for earlier, later in pairwise(of_decodes):
        is_border = (later.bounds[3] - 1) % 4 == 0
        assert (earlier.key_slabs is later.key_slabs) == (not is_border)
        assert (earlier.value_slabs is later.value_slabs) == (not is_border)


def test_a_prompt_is_found_again_as_its_cell_has_to_see_it():
    bench = Bench()
    prompt = list(range(30))
    bench.add("a", prompt, 1)
    bench.drain()
    bench.add("b", prompt, 1)
    bench.step()
    assert bench.entry("b").start == 28
    bench.add("c", [*prompt[:26], 7, 7, 7, 7, 7], 1)
    bench.step()
    assert bench.entry("c").start == 24
    bench.add("d", prompt, 1, cache_salt=b"other")
    bench.step()
    assert bench.entry("d").start == 0
    bench.drain()
    assert [bench.finals[each].usage.cached_tokens for each in "abcd"] == [0, 28, 24, 0]


def fill(bench, num_slabs):
    """Take slabs away until only so many of each arena are left."""
    taken = []
    for arena in (bench.group.arenas.keys, bench.group.arenas.values):
        num_blocks = arena.num_unreferenced_slabs - num_slabs
        taken.append(arena.allocate(num_blocks, CONFIG.cold.keys))
    return taken


def test_a_chunk_takes_what_room_there_is_block_by_block():
    bench = Bench(max_num_batched_tokens=16)
    bench.scheduler.add(Sequence("a", list(range(40)), 40, SamplingParams(1)))
    batch = bench.scheduler.schedule()
    bench.scheduler.postprocess(batch, bench.executor.execute(batch))
    fill(bench, 6)
    batch = bench.scheduler.schedule()  # a cell wants 8 slabs and what it demotes
    (entry,) = batch.scheduled
    assert (entry.start, entry.num_new_tokens) == (16, 4)


def test_what_a_victim_leaves_is_given_away_once_no_step_can_read_it():
    bench = Bench()
    for name in "ab":
        bench.scheduler.add(Sequence(name, list(range(7)), 7, SamplingParams(40)))

    def plan():
        batch = bench.scheduler.schedule()
        return batch, bench.executor.execute(batch) if batch else None

    in_flight = [plan()]  # the prompts
    in_flight.append(plan())  # token 7, the last of the second block
    bench.scheduler.postprocess(*in_flight.pop(0))
    fill(bench, 2)  # a new block takes 4 slabs
    batch, _ = plan()
    assert not batch
    assert batch.preempted == ("b",)
    bench.scheduler.postprocess(*in_flight.pop(0))
    batch, _ = plan()
    assert [entry.sequence.seq_id for entry in batch.scheduled] == ["a"]


@pytest.mark.parametrize("replays_decodes", [False, True])
def test_a_preempted_sequence_goes_on_as_if_nothing_had_been(replays_decodes):
    """Too many for the arena: the books and every content are held against the tokens."""
    bench = Bench(num_slabs=60, replays_decodes=replays_decodes)
    prompts = {f"s{index}": [index] * (5 + index) for index in range(5)}
    for seq_id, prompt in prompts.items():
        bench.add(seq_id, prompt, 40)
    bench.drain()
    assert bench.engine.totals.preemptions > 0
    for seq_id, prompt in prompts.items():
        assert bench.tokens[seq_id] == expected_completion(prompt, 40, VOCAB_SIZE)
        assert bench.finals[seq_id].finish_reason is FinishReason.LENGTH
    spans = [s for b in bench.executor.batches for e in b.scheduled for s in e.spans]
    replayed = [e for b in bench.executor.batches for e in b.scheduled if e.spans[0].is_decode]
    assert all(span.end - span.start == 1 for span in spans if span.is_decode)
    assert any(not entry.samples for entry in replayed) == replays_decodes or replays_decodes


def test_abort_gives_everything_back():
    bench = Bench()
    bench.add("a", range(30), 10)
    bench.add("b", range(8), 10)
    for _ in range(4):
        bench.step()
    bench.engine.abort("a")
    bench.engine.abort("b")
    bench.drain()
    for arena in (bench.group.arenas.keys, bench.group.arenas.values):
        assert arena.num_unreferenced_slabs == arena.num_slabs
    assert bench.space.num_free_blocks == bench.space.num_blocks == 200


def test_an_arena_must_hold_the_context_and_what_it_takes_to_move_on():
    with pytest.raises(
        CacheTooSmall, match=r"max_model_len 64 needs \d+ slabs of keys in layer group 0.* holds 30"
    ):
        Bench(num_slabs=30)


@pytest.mark.parametrize("cold_format", COLD_FORMATS)
@pytest.mark.parametrize("context", [64, 66, 70, 98])
def test_in_an_arena_that_just_holds_the_context_any_prompt_comes_to_its_end(context, cold_format):
    """Most is held where a cell ends, and it is given back only by what comes after."""
    config = TierConfig(
        cold_format=cold_format,
        sink_tokens=4,
        hot_tokens=8,
        warm_tokens=32,
        cell_tokens=32,
        block_size=4,
    )
    num_slabs = max(num_slabs_needed(config, part, context) for part in Part)
    for num_prompt_tokens in range(24, context, 4):
        bench = Bench(num_slabs, ahead=1, context=context, config=config)
        bench.add("a", range(num_prompt_tokens), context - num_prompt_tokens)
        bench.drain(max_steps=100)
        assert bench.engine.totals.preemptions == 0
    with pytest.raises(CacheTooSmall):
        Bench(num_slabs - 2, context=context, config=config)


def test_check_integrity_names_what_disagrees():
    bench = Bench()
    bench.add("a", range(30), 10)
    bench.step()
    (sequence,) = bench.scheduler._running
    with pytest.raises(IntegrityError, match="a waits and owns blocks"):
        bench.space.check_integrity([sequence], [])
    with pytest.raises(IntegrityError, match="1 have a place, 0 run"):
        bench.space.check_integrity([], [])
    sequence.num_computed_tokens -= 1
    with pytest.raises(IntegrityError, match="a has 29 tokens computed, its table 30"):
        bench.space.check_integrity([], [sequence])
