import dataclasses
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.errors import IntegrityError
from engine.outputs import SampledTokens
from engine.ranks.follower import FollowedBatch, FollowerBooks
from engine.ranks.leader import LeadingExecutor
from engine.ranks.plan import PlannedChunk, decode_plan, encode_plan, max_plan_bytes
from engine.sampling_params import SamplingParams
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from tests.fakes.executor import FakeExecutor

words = st.integers(0, 2**32 - 1)
word_tuples = st.lists(words, max_size=5).map(tuple)


@st.composite
def planned_chunks(draw: st.DrawFn) -> PlannedChunk:
    token_ids = draw(st.none() | st.lists(words, min_size=1, max_size=5).map(tuple))
    num_new_tokens = 1 if token_ids is None else len(token_ids)
    return PlannedChunk(
        draw(st.integers(0, 2**16 - 1)),
        draw(words),
        num_new_tokens,
        token_ids,
        draw(words),
        draw(word_tuples),
        draw(st.booleans()),
    )


plans = st.lists(planned_chunks(), max_size=6).map(tuple)


@given(plans)
def test_a_plan_comes_back_as_it_was(chunks):
    encoded = encode_plan(chunks)
    assert decode_plan(encoded) == chunks
    num_words = sum(len(chunk.new_blocks) + len(chunk.token_ids or ()) for chunk in chunks)
    assert len(encoded) == max_plan_bytes(len(chunks), num_words, 0)


@given(plans, st.integers(1, 10))
def test_a_plan_that_is_not_whole_is_refused(chunks, num_bytes):
    encoded = encode_plan(chunks)
    for damaged in (encoded[:-num_bytes], encoded + bytes(num_bytes)):
        with pytest.raises(IntegrityError):
            decode_plan(damaged)


def test_another_version_is_refused():
    encoded = struct.pack("<H", 99) + encode_plan(())[2:]
    with pytest.raises(IntegrityError, match="version 99 came, expected 1"):
        decode_plan(encoded)


class Telegraph:
    """The followers' side of every step, held against what rank 0 computes."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.plan_bytes: list[int] = []
        self.carried: list[PlannedChunk] = []
        self._executor = executor
        self._books = FollowerBooks()
        self._followed: FollowedBatch | None = None

    def publish(self, plan: bytes) -> None:
        self.plan_bytes.append(len(plan))
        chunks = decode_plan(plan)
        self.carried += chunks
        self._followed = self._books.open(chunks)

    def execute(self, batch: ScheduledBatch) -> SampledTokens:
        followed = self._followed
        assert followed is not None, "computed before it was published"
        for ours, theirs in zip(batch.scheduled, followed.scheduled, strict=True):
            assert (ours.start, ours.end, ours.samples) == (
                theirs.start,
                theirs.end,
                theirs.samples,
            )
            assert ours.num_new_tokens == theirs.num_new_tokens
            assert tuple(ours.new_token_ids) == theirs.new_token_ids
            assert ours.block_table == theirs.block_table
        sampled = self._executor.execute(batch)
        self._books.close(followed, sampled.token_ids)
        self._followed = None
        return sampled


def led_engine(num_blocks: int) -> tuple[Engine, Telegraph]:
    telegraph = Telegraph(FakeExecutor(4))
    scheduler = Scheduler(
        SchedulerConfig(8, 16),
        PagedSpace(BlockAllocator(num_blocks, 4, enable_prefix_cache=True), b"m"),
        48,
    )
    executor = LeadingExecutor(telegraph, telegraph, 2)
    return Engine(scheduler, executor, vocab_size=97, check_integrity=True), telegraph


@pytest.mark.parametrize("seed", range(6))
def test_followers_see_every_batch_as_rank_0_does(seed):
    """Chunked prefills, shared prefixes, preemption, aborts, stop tokens; slots are used again."""
    chance = random.Random(seed)
    engine, telegraph = led_engine(num_blocks=14)
    for number in range(60):
        prompt = [chance.randrange(3) for _ in range(chance.randrange(1, 30))]
        stop_token_ids = frozenset({chance.randrange(97)})
        params = SamplingParams(chance.randrange(18), stop_token_ids=stop_token_ids)
        engine.add(str(number), prompt, params)
        for _ in range(chance.randrange(5)):
            engine.step()
        if number % 7 == 0:
            engine.abort(str(chance.randrange(number + 1)))
    while engine.has_work:
        engine.step()
    assert engine.totals.preemptions > 0
    assert engine.totals.cached_tokens > 0
    assert max(chunk.slot for chunk in telegraph.carried) < 8
    assert any(chunk.token_ids is None for chunk in telegraph.carried)


def test_a_common_decode_step_takes_twenty_bytes_a_sequence():
    engine, telegraph = led_engine(num_blocks=64)
    for number in range(8):
        engine.add(str(number), range(number, number + 2), SamplingParams(3))
    engine.step()
    engine.step()
    assert telegraph.plan_bytes[1] == 8 + 8 * 20
    decodes = telegraph.carried[8:]
    assert {chunk.token_ids for chunk in decodes} == {None}
    assert {dataclasses.astuple(chunk)[4:6] for chunk in decodes} == {(1, ())}
