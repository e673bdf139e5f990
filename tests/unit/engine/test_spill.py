import random

import pytest

from engine.cache.block_allocator import BlockAllocator
from engine.cache.spill import Restores
from engine.cache.tiers import BlockRestore, ColdBlock
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.errors import IntegrityError
from engine.outputs import Usage
from engine.sampling_params import SamplingParams
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, SequenceStatus
from tests.fakes.cold_tier import FakeColdTier
from tests.fakes.executor import FakeExecutor, expected_completion

BLOCK_SIZE = 4
VOCAB_SIZE = 97
CHAIN = [bytes([index]) * 16 for index in range(4)]


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class Bench:
    """A whole engine over the fake executor, with a cold tier that outlives it."""

    def __init__(
        self, tier, *, num_blocks=9, context=32, max_num_sequences=4, max_restores_per_step=64
    ):
        self.clock = Clock()
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE, enable_prefix_cache=True)
        self.restores = Restores(
            tier, max_wait_s=0.5, max_per_step=max_restores_per_step, clock=self.clock
        )
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_sequences, 32),
            PagedSpace(self.allocator, b"model", None if tier is None else self.restores),
            context,
        )
        self.executor = FakeExecutor(BLOCK_SIZE, cold_tier=tier)
        self.engine = Engine(
            self.scheduler, self.executor, vocab_size=VOCAB_SIZE, check_integrity=True
        )
        self.outputs = []

    def add(self, seq_id, prompt, max_tokens=4, **options):
        sequence = self.engine.prepare(seq_id, prompt, SamplingParams(max_tokens), **options)
        self.engine.add_prepared(sequence)
        return sequence

    def step(self):
        self.clock.now_s += 0.1
        self.outputs += self.engine.step().outputs

    def drain(self):
        num_steps = 0
        while self.engine.has_work:
            self.step()
            num_steps += 1
            assert num_steps < 5_000
        return num_steps

    def run(self, seq_id, prompt, max_tokens=4, **options):
        """Cached tokens of one sequence alone, its completion checked."""
        sequence = self.add(seq_id, prompt, max_tokens, **options)
        self.drain()
        assert self.completion(seq_id) == expected_completion(prompt, max_tokens, VOCAB_SIZE)
        return sequence.num_cached_tokens

    def completion(self, seq_id):
        return [t for output in self.outputs if output.seq_id == seq_id for t in output.token_ids]

    def evict_everything(self):
        self.allocator.free(self.allocator.allocate(self.allocator.num_free_blocks))
        self.spill_evicted()

    def spill_evicted(self):
        """As the next plan would say it."""
        self.executor._spill(self.allocator.take_evicted())


def warm_tier(prompt, delays=(), **options):
    """A tier that holds every full block of `prompt`, from an engine that is gone."""
    tier = FakeColdTier()
    bench = Bench(tier)
    bench.run("warm", prompt, **options)
    bench.evict_everything()
    return FakeColdTier(delays, tier.stored)


def test_evicted_blocks_are_spilled_with_their_tenant_before_they_are_overwritten():
    tier = FakeColdTier()
    bench = Bench(tier)
    first = bench.add("a", range(16), cache_salt=b"ours")
    bench.drain()
    assert tier.stored == {}
    bench.run("b", range(40, 68), cache_salt=b"theirs")
    assert {tenant for tenant, _ in tier.stored} == {b"ours"}
    assert {block_hash for _, block_hash in tier.stored} <= set(first.block_hashes)
    spilled = [spill for batch in bench.executor.batches for spill in batch.spills]
    assert len(spilled) == tier.counters.spilled == bench.engine.totals.spilled_blocks == 3


def test_prefix_of_another_engine_is_restored_and_counts_as_cached():
    tier = warm_tier(range(16))
    bench = Bench(tier)
    assert bench.run("b", range(17)) == 16
    assert tier.counters.restored == bench.engine.totals.restored_blocks == 4
    assert bench.outputs[-1].usage == Usage(17, 16, 4)
    assert bench.run("c", range(17)) == 16
    assert tier.counters.restored == 4, "the restored blocks are hits of the GPU's own cache now"


def test_last_token_is_never_restored():
    assert Bench(warm_tier(range(16))).run("b", range(16)) == 12


def test_only_what_the_gpu_lacks_is_asked_for():
    tier = warm_tier(range(16))
    bench = Bench(tier)
    bench.run("head", range(9), max_tokens=1)
    assert tier.counters.restored == 2
    assert bench.run("b", range(17)) == 16
    assert tier.counters.restored == 4


def test_tenants_do_not_see_each_others_blocks():
    bench = Bench(warm_tier(range(16), cache_salt=b"ours"))
    assert bench.run("theirs", range(17), cache_salt=b"theirs") == 0
    assert bench.run("ours", range(17), cache_salt=b"ours") == 16


@pytest.mark.parametrize("lost", [0, 1, 3])
@pytest.mark.parametrize("how", [FakeColdTier.forget, FakeColdTier.damage])
def test_what_is_lost_or_damaged_is_computed_again_and_counted(lost, how):
    tier = warm_tier(range(16))
    chain = Bench(None).add("chain", range(16)).block_hashes
    how(tier, [block_hash for _, block_hash in tier.stored].index(chain[lost]))
    assert Bench(tier).run("b", range(17)) == 4 * lost
    assert (tier.counters.restored, tier.counters.missed) == (lost, 4 - lost)
    assert tier.counters.corrupt == (how is FakeColdTier.damage)


def test_full_tier_drops_and_nothing_else_changes():
    tier = FakeColdTier()
    tier.is_full = True
    bench = Bench(tier)
    bench.run("a", range(16))
    bench.run("b", range(40, 68))
    assert (tier.counters.spilled, tier.counters.dropped, tier.stored) == (0, 3, {})


def test_idle_steps_sleep_until_the_answer_is_there():
    tier = warm_tier(range(16), delays=[2])
    bench = Bench(tier)
    sequence = bench.add("b", range(17))
    for _ in range(3):
        bench.step()
        assert (sequence.status, bench.outputs) == (SequenceStatus.WAITING, [])
    bench.step()
    assert sequence.num_cached_tokens == 16
    assert tier.waits_s == [0.005] * 3


def test_answer_that_never_comes_is_awaited_for_a_bounded_time():
    tier = warm_tier(range(16), delays=[None])
    bench = Bench(tier)
    sequence = bench.add("b", range(17))
    bench.drain()
    assert bench.clock.now_s < 0.5 + 0.1 * 7
    assert (sequence.num_cached_tokens, tier.requests) == (0, {})
    assert bench.completion("b") == expected_completion(range(17), 4, VOCAB_SIZE)


def test_others_pass_a_sequence_that_awaits_its_blocks():
    tier = warm_tier(range(16), delays=[4])
    bench = Bench(tier, num_blocks=16)
    slow = bench.add("slow", range(17))
    bench.add("quick", [90, 91], max_tokens=2)
    bench.drain()
    order = [output.seq_id for output in bench.outputs if output.finish_reason]
    assert order == ["quick", "slow"]
    assert slow.num_cached_tokens == 16
    assert tier.waits_s == [0.005] * 3


def test_its_place_is_not_given_away_meanwhile():
    tier = warm_tier(range(16), delays=[4])
    bench = Bench(tier)
    bench.add("slow", range(17))
    behind = bench.add("behind", range(50, 66))
    bench.step()
    assert behind.status is SequenceStatus.WAITING


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_abort_while_restoring_leaks_nothing(num_steps):
    tier = warm_tier(range(16), delays=[1])
    bench = Bench(tier)
    bench.add("b", range(17))
    for _ in range(num_steps):
        bench.step()
    assert bench.engine.abort("b") == Usage(17, 16 if num_steps > 2 else 0, max(0, num_steps - 2))
    bench.step()
    assert bench.outputs[-1].finish_reason is FinishReason.ABORT
    assert bench.allocator.num_referenced_blocks == bench.restores.num_awaited == 0
    assert tier.requests == {}
    assert not bench.engine.has_work
    bench.outputs.clear()
    assert bench.run("b", range(17)) == 16


def test_answer_to_an_aborted_sequence_is_not_given_to_its_namesake():
    tier = warm_tier(range(16), delays=[1, 0])
    bench = Bench(tier)
    bench.add("b", range(17))
    bench.step()
    bench.engine.abort("b")
    assert bench.run("b", range(60, 77)) == 0


@pytest.mark.parametrize(("max_restores_per_step", "expected"), [(1, [1] * 4), (3, [3, 1])])
def test_beside_others_a_long_prefix_comes_in_parts(max_restores_per_step, expected):
    tier = warm_tier(range(16))
    bench = Bench(tier, num_blocks=16, max_restores_per_step=max_restores_per_step)
    bench.add("busy", [90], max_tokens=20)
    bench.step()
    sequence = bench.add("b", range(17))
    bench.drain()
    restores = [len(batch.restores) for batch in bench.executor.batches if batch.restores]
    assert restores == expected
    assert sequence.num_cached_tokens == 16
    assert bench.completion("b") == expected_completion(range(17), 4, VOCAB_SIZE)


def test_parts_stop_at_a_block_that_the_gpu_still_has():
    tier = warm_tier(range(16))
    bench = Bench(tier, num_blocks=16, max_restores_per_step=3)
    bench.add("busy", [90], max_tokens=20)
    bench.step()
    sequence = bench.add("b", range(17))
    (kept,) = bench.allocator.allocate(1)
    bench.allocator.register(kept, sequence.block_hashes[2], b"")
    bench.executor._restore(
        [BlockRestore(kept, sequence.block_hashes[2], (stored_payload(tier, sequence, 2),))]
    )
    bench.allocator.free([kept])
    bench.drain()
    restores = [len(batch.restores) for batch in bench.executor.batches if batch.restores]
    assert restores == [2, 1]
    assert sequence.num_cached_tokens == 16


def stored_payload(tier, sequence, index):
    return tier.stored[sequence.cache_salt, sequence.block_hashes[index]][0]


def test_alone_a_long_prefix_comes_at_once():
    tier = warm_tier(range(16))
    bench = Bench(tier, max_restores_per_step=1)
    assert bench.run("b", range(17)) == 16
    assert [len(batch.restores) for batch in bench.executor.batches if batch.restores] == [4]


def test_two_with_one_prefix_restore_it_once_each_and_share_the_first():
    tier = warm_tier(range(16))
    bench = Bench(tier, num_blocks=20)
    first, second = bench.add("b", range(17)), bench.add("c", range(18))
    bench.drain()
    assert first.num_cached_tokens == second.num_cached_tokens == 16
    assert bench.engine.totals.restored_blocks == 4
    assert bench.completion("c") == expected_completion(range(18), 4, VOCAB_SIZE)


def test_one_that_gave_up_shares_what_another_gets_in_the_same_step():
    tier = warm_tier(range(16), delays=[1, None])
    bench = Bench(tier, num_blocks=20)
    bench.add("b", range(17))
    second = bench.add("c", range(18))
    bench.step()
    bench.step()
    bench.clock.now_s += 1
    bench.step()
    assert [len(batch.restores) for batch in bench.executor.batches] == [4]
    assert second.num_cached_tokens == 16
    bench.drain()
    assert bench.completion("c") == expected_completion(range(18), 4, VOCAB_SIZE)


def test_hits_evicted_while_waiting_are_asked_for_too():
    tier = warm_tier(range(16), delays=[0, 2, 0])
    bench = Bench(tier)
    bench.run("head", range(9), max_tokens=1)
    sequence = bench.add("b", range(17))
    bench.step()
    bench.evict_everything()
    bench.drain()
    assert sequence.num_cached_tokens == 16
    assert bench.completion("b") == expected_completion(range(17), 4, VOCAB_SIZE)


def test_preempted_sequence_comes_back_through_the_tier():
    tier = FakeColdTier()
    bench = Bench(tier, num_blocks=8, context=28)
    bench.add("old", range(8), max_tokens=20)
    young = bench.add("young", range(50, 58), max_tokens=12)
    bench.drain()
    assert young.num_preemptions > 0
    assert bench.engine.totals.restored_blocks > 0
    assert young.num_cached_tokens == 0, "usage counts what the first admission found"
    assert bench.completion("old") == expected_completion(range(8), 20, VOCAB_SIZE)
    assert bench.completion("young") == expected_completion(range(50, 58), 12, VOCAB_SIZE)


def test_without_a_tier_plans_say_nothing():
    bench = Bench(None)
    for index in range(4):
        bench.run(f"s{index}", range(20 * index, 20 * index + 16))
    assert not any(batch.spills or batch.restores for batch in bench.executor.batches)
    assert bench.allocator.num_cached_blocks > 0


def test_500_sequences_over_a_pool_too_small_say_what_they_would_say_alone():
    rng = random.Random(7)
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(16)] for _ in range(12)]
    tier = FakeColdTier(rng.choice([0, 0, 1, 2, None]) for _ in range(200))
    bench = Bench(tier, num_blocks=12, context=40, max_num_sequences=6)
    prompts = {}
    for index in range(500):
        prompt = rng.choice(prefixes)[: rng.randrange(1, 17)] + [rng.randrange(VOCAB_SIZE)] * 3
        prompts[f"s{index}"] = prompt
        bench.add(f"s{index}", prompt, max_tokens=1 + index % 9)
        if index % 3 == 0:
            bench.step()
        if index % 50 == 0:
            tier.damage(index)
    bench.drain()
    for index, (seq_id, prompt) in enumerate(prompts.items()):
        expected = expected_completion(prompt, 1 + index % 9, VOCAB_SIZE)
        assert bench.completion(seq_id) == expected
    assert bench.engine.totals.preemptions > 0
    assert bench.engine.totals.restored_blocks > 100


def test_restores_are_found_only_where_no_gap_lies_before():
    tier = FakeColdTier()
    tier.spill([ColdBlock(b"t", block_hash, b"payload") for block_hash in CHAIN])
    restores = Restores(tier, clock=Clock())
    assert restores.is_awaited("a", b"t", CHAIN, 1)
    assert restores.num_found("a", 1) == 0
    restores.collect()
    assert [restores.num_found("a", num_hits) for num_hits in range(5)] == [0, 3, 2, 1, 0]
    assert not restores.is_awaited("a", b"t", CHAIN, 1)


def test_nothing_is_asked_when_the_gpu_has_it_all():
    tier = FakeColdTier()
    restores = Restores(tier, clock=Clock())
    assert not restores.is_awaited("a", b"t", CHAIN, 4)
    assert (restores.num_awaited, tier.requests) == (0, {})


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda r: r._by_ticket.clear(), r"tickets \[\] are booked"),
        (lambda r: r._by_seq_id.pop("a"), r"restores of \[\]"),
        (lambda r: r._by_seq_id.__setitem__("b", r._by_seq_id["a"]), r"\['a'\] wait"),
        (lambda r: r._placed.append(None), "1 placed blocks are in no plan"),
    ],
)
def test_check_integrity_names_what_disagrees(damage, complaint):
    restores = Restores(FakeColdTier(), clock=Clock())
    assert restores.is_awaited("a", b"t", CHAIN, 0)
    restores.check_integrity({"a"})
    damage(restores)
    with pytest.raises(IntegrityError, match=complaint):
        restores.check_integrity({"a"})
