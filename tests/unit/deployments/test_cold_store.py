import threading
import time

import numpy as np
import pytest

from deployments.cold_client import ColdClient
from deployments.cold_store import ChainQuery, ColdStoreLimits, PartLabel
from deployments.node_stores import RECONNECT_S, RayStore, StoreUnavailable
from engine.async_engine import AsyncEngine
from engine.cache.block_allocator import BlockAllocator
from engine.cache.spill import Restores
from engine.cache.tiers import ColdBlock, checksum
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.sampling_params import SamplingParams
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from tests.fakes.cold_store import FakeClock, InProcessStore
from tests.fakes.executor import FakeExecutor, expected_completion

BLOCK_BYTES = 100
LIMITS = ColdStoreLimits(max_bytes=2_000, max_tenant_bytes=1_000, chunk_bytes=300, lease_s=30)
CHAIN = [bytes([index]) * 16 for index in range(40)]


def payload_of(index, rank=0):
    return bytes([index, rank]) * (BLOCK_BYTES // 2)


def store_blocks(store, indices, tenant=b"ours", rank=0):
    """How many of the blocks with these indices were kept."""
    payloads = [payload_of(index, rank) for index in indices]
    labels = [
        PartLabel((tenant, CHAIN[index], rank), BLOCK_BYTES, checksum(payload))
        for index, payload in zip(indices, payloads, strict=True)
    ]
    return store.store(labels, np.frombuffer(b"".join(payloads), np.uint8))


def num_found(store, indices, tenant=b"ours", num_ranks=1):
    """Leading blocks found, without a trace."""
    lease = store.find([ChainQuery(tenant, tuple(CHAIN[i] for i in indices))], num_ranks)
    store.release(lease.lease_id)
    return len(lease.found[0])


def test_blocks_are_sealed_into_chunks_and_read_back_from_both_places():
    store = InProcessStore(LIMITS)
    assert store_blocks(store.actor, range(5)) == 5
    stats = store.actor.stats()
    assert (stats.num_chunks, stats.num_bytes, stats.num_unsealed_bytes) == (2, 500, 200)
    assert [len(content) for content in store.objects] == [300]
    lease = store.find([ChainQuery(b"ours", tuple(CHAIN[:6]))], 1)
    content = store.fetch(lease.chunks)
    for index, (place,) in enumerate(lease.found[0]):
        stored = content[place.chunk_id][place.offset : place.offset + place.label.num_bytes]
        assert bytes(stored) == payload_of(index)
    assert len(lease.found[0]) == 5


def test_a_block_is_kept_once():
    store = InProcessStore(LIMITS)
    assert store_blocks(store.actor, [0, 1]) == 2
    assert store_blocks(store.actor, [1, 2]) == 2
    assert store.actor.stats().num_bytes == 300
    assert store.missing([(b"ours", CHAIN[i], 0) for i in range(5)]) == [
        (b"ours", CHAIN[3], 0),
        (b"ours", CHAIN[4], 0),
    ]


def test_same_hash_of_another_tenant_or_rank_is_another_block():
    store = InProcessStore(LIMITS)
    store_blocks(store.actor, [0], tenant=b"ours")
    assert num_found(store.actor, [0], tenant=b"theirs") == 0
    store_blocks(store.actor, [0], tenant=b"theirs")
    assert store.actor.stats().num_chunks == 2
    assert num_found(store.actor, [0], num_ranks=2) == 0
    store_blocks(store.actor, [0], rank=1)
    assert num_found(store.actor, [0], num_ranks=2) == 1


def test_tenant_over_its_quota_evicts_its_own_oldest_chunk():
    store = InProcessStore(LIMITS)
    store_blocks(store.actor, range(9), tenant=b"theirs")
    store_blocks(store.actor, range(9))
    assert num_found(store.actor, range(3)) == 3  # used just now
    assert store_blocks(store.actor, [9, 10]) == 2
    assert [num_found(store.actor, [i]) for i in (0, 3, 6, 9, 10)] == [1, 0, 1, 1, 1]
    assert num_found(store.actor, range(9), tenant=b"theirs") == 9
    assert store.actor.stats().evicted_parts_total == 3


def test_full_store_evicts_the_oldest_of_all():
    store = InProcessStore(LIMITS)
    for tenant in (b"a", b"b", b"c"):
        assert store_blocks(store.actor, range(9), tenant=tenant) == 9
    assert store.actor.stats().num_bytes <= LIMITS.max_bytes
    assert num_found(store.actor, range(9), tenant=b"c") == 9
    assert num_found(store.actor, range(9), tenant=b"a") == 0


def test_leased_chunks_stay_and_the_rest_is_refused():
    store = InProcessStore(LIMITS)
    store_blocks(store.actor, range(10))
    lease = store.find([ChainQuery(b"ours", tuple(CHAIN[:10]))], 1)
    assert store_blocks(store.actor, range(10, 14)) == 0
    assert store.actor.stats().refused_parts_total == 4
    assert num_found(store.actor, range(10)) == 10
    store.release(lease.lease_id)
    store.release(lease.lease_id)
    assert store_blocks(store.actor, range(10, 14)) == 4


def test_lease_of_a_dead_reader_runs_out():
    store = InProcessStore(LIMITS)
    store_blocks(store.actor, range(10))
    store.find([ChainQuery(b"ours", tuple(CHAIN[:10]))], 1)
    store.clock.now_s = 29.9
    assert store_blocks(store.actor, range(10, 14)) == 0
    store.clock.now_s = 30.0
    assert store_blocks(store.actor, range(10, 14)) == 4
    assert store.actor.stats().num_leases == 0


def test_block_larger_than_the_limits_is_refused_and_evicts_nothing():
    store = InProcessStore(LIMITS)
    store_blocks(store.actor, range(3))
    label = PartLabel((b"ours", CHAIN[9], 0), 1_001, 0)
    assert store.actor.store([label], np.zeros(1_001, np.uint8)) == 0
    assert num_found(store.actor, range(3)) == 3


def test_discarded_chunks_are_gone_even_when_leased():
    store = InProcessStore(LIMITS)
    store_blocks(store.actor, range(4))
    lease = store.find([ChainQuery(b"ours", tuple(CHAIN[:4]))], 1)
    store.discard([*lease.chunks, 99])
    store.release(lease.lease_id)
    stats = store.actor.stats()
    assert (stats.num_parts, stats.num_chunks, stats.num_bytes, stats.num_tenants) == (0, 0, 0, 0)


def test_drained_store_is_empty_and_stays_so():
    store = InProcessStore(LIMITS)
    store_blocks(store.actor, range(4))
    store.actor.drain()
    assert store_blocks(store.actor, range(4)) == 0
    assert num_found(store.actor, range(4)) == 0
    assert store.actor.stats().num_bytes == 0


@pytest.fixture
def connect():
    clients = []

    def open_client(*stores, **options):
        clients.append(ColdClient(lambda: stores, **options))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


def blocks_of(indices, tenant=b"ours", rank=0):
    return [ColdBlock(tenant, CHAIN[index], payload_of(index, rank)) for index in indices]


def restore(client, indices, tenant=b"ours", ticket=0):
    client.request_restore(ticket, tenant, [CHAIN[index] for index in indices])
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        client.wait(1)
        for answer in client.poll():
            assert answer.ticket == ticket
            return [tuple(bytes(payload) for payload in payloads) for payloads in answer.blocks]
    raise AssertionError("no answer in 10 s")


def spill(client, indices, **options):
    client.spill(blocks_of(indices, **options))
    assert client.flush(10)


def test_client_restores_what_another_spilled(connect):
    store = InProcessStore(LIMITS)
    first = connect(store)
    spill(first, range(5))
    first.close()
    second = connect(store)
    assert restore(second, range(7)) == [(payload_of(index),) for index in range(5)]
    counters = second.counters
    assert (counters.restored, counters.missed, counters.corrupt) == (5, 2, 0)
    assert first.counters.spilled == 5
    assert store.actor.stats().num_leases == 0


def test_client_restores_only_the_tenants_own(connect):
    client = connect(InProcessStore(LIMITS))
    spill(client, range(5))
    assert restore(client, range(5), tenant=b"theirs") == []


def test_client_does_not_send_twice(connect):
    store = InProcessStore(LIMITS)
    client = connect(store)
    spill(client, range(5))
    spill(client, range(3, 8))
    assert (store.num_sent, client.counters.spilled) == (8, 10)


def test_restore_needs_every_rank(connect):
    store = InProcessStore(LIMITS)
    ranks = [connect(store, rank=rank, num_ranks=2) for rank in range(2)]
    spill(ranks[0], range(4))
    spill(ranks[1], range(3), rank=1)
    assert restore(ranks[0], range(4)) == [(payload_of(i, 0), payload_of(i, 1)) for i in range(3)]


@pytest.mark.parametrize(
    ("damage", "num_restored", "num_corrupt"),
    [
        (lambda content: content.__setitem__(150, content[150] ^ 1), 1, 1),
        (lambda content: content.resize(250, refcheck=False), 2, 1),
    ],
)
def test_damaged_chunks_are_missed_counted_and_forgotten(
    connect, damage, num_restored, num_corrupt
):
    store = InProcessStore(LIMITS)
    client = connect(store)
    spill(client, range(6))
    damage(store.objects[0])
    assert len(restore(client, range(6))) == num_restored
    counters = client.counters
    assert (counters.corrupt, counters.missed) == (num_corrupt, 6 - num_restored)
    assert restore(client, range(6), ticket=1) == []
    assert client.counters.corrupt == num_corrupt
    assert restore(client, range(3, 6), ticket=2) == [(payload_of(i),) for i in range(3, 6)]


def test_lost_chunks_are_missed_and_forgotten(connect):
    store = InProcessStore(LIMITS)
    client = connect(store)
    spill(client, range(6))
    store.objects[1] = None
    assert len(restore(client, range(6))) == 3
    assert (client.counters.missed, client.counters.corrupt) == (3, 0)
    assert store.actor.stats().num_chunks == 1


def test_dead_store_is_a_miss_and_a_drop_until_it_is_back(connect):
    store = InProcessStore(LIMITS)
    client = connect(store)
    store.is_down = True
    spill(client, range(2))
    assert restore(client, range(2)) == []
    counters = client.counters
    assert (counters.spilled, counters.dropped, counters.missed) == (0, 2, 2)
    store.is_down = False
    spill(client, range(2))
    assert len(restore(client, range(2), ticket=1)) == 2


def test_other_nodes_are_asked_for_the_rest(connect):
    own, peer = InProcessStore(LIMITS), InProcessStore(LIMITS)
    spill(connect(own), range(2))
    spill(connect(peer), range(5))
    client = connect(own, peer)
    assert restore(client, range(6)) == [(payload_of(index),) for index in range(5)]
    own.is_down = True
    assert len(restore(client, range(6), ticket=1)) == 5
    assert store_keeps_nothing_leased(own, peer)


def store_keeps_nothing_leased(*stores):
    return all(store.actor.stats().num_leases == 0 for store in stores)


def test_full_queue_drops_and_never_blocks(connect):
    store = InProcessStore(LIMITS)
    store.gate.clear()
    client = connect(store, max_queued_bytes=3 * BLOCK_BYTES)
    started_s = time.monotonic()
    client.spill(blocks_of(range(8)))
    assert time.monotonic() - started_s < 1
    assert client.counters.dropped == 5
    assert not client.flush(0.01)
    store.gate.set()
    assert client.flush(10)
    assert client.counters.spilled == 3


def test_what_is_not_sent_yet_is_found_around_what_is(connect):
    store = InProcessStore(LIMITS)
    client = connect(store)
    spill(client, range(2, 4))
    store.gate.clear()
    client.spill(blocks_of([0, 1, 4]))
    threading.Timer(0.05, store.gate.set).start()
    assert restore(client, range(6)) == [(payload_of(index),) for index in range(5)]


def test_cancelled_restore_is_missed_and_not_answered(connect):
    store = InProcessStore(LIMITS)
    client = connect(store)
    spill(client, range(2))
    store.gate.clear()
    client.request_restore(0, b"ours", CHAIN[:2])
    client.cancel_restore(0)
    client.cancel_restore(0)
    store.gate.set()
    assert len(restore(client, range(2), ticket=1)) == 2
    assert (client.counters.restored, client.counters.missed) == (2, 2)


def test_unexpected_error_costs_one_batch_and_not_the_thread(connect, caplog):
    store = InProcessStore(LIMITS)
    client = connect(store)
    actor, store.actor = store.actor, None
    spill(client, range(2))
    assert restore(client, range(2)) == []
    store.actor = actor
    spill(client, range(2))
    assert len(restore(client, range(2), ticket=1)) == 2
    assert "cold spill failed" in caplog.text
    assert "cold restore failed" in caplog.text


def test_store_that_failed_is_left_alone_for_a_while():
    clock = FakeClock()
    num_calls = 0

    def connect():
        nonlocal num_calls
        num_calls += 1
        raise ValueError("no such actor")

    store = RayStore(connect, clock)
    for now_s, expected in ((0.0, 1), (RECONNECT_S / 2, 1), (RECONNECT_S, 2)):
        clock.now_s = now_s
        with pytest.raises(StoreUnavailable):
            store.missing([])
        assert num_calls == expected
    store.release(1)
    store.discard([1])


def engine_on(client, num_blocks=12):
    allocator = BlockAllocator(num_blocks, 4, enable_prefix_cache=True)
    restores = Restores(client, max_wait_s=10.0)
    scheduler = Scheduler(SchedulerConfig(4, 16), PagedSpace(allocator, b"model", restores), 40)
    executor = FakeExecutor(4, cold_tier=client)
    return AsyncEngine(Engine(scheduler, executor, vocab_size=97, check_integrity=True))


def complete(engine, prompts, **options):
    """Completions and cached tokens of sequences that run together."""
    for seq_id, prompt in prompts.items():
        engine.add(seq_id, prompt, SamplingParams(6), **options)
    completions, num_cached = {seq_id: [] for seq_id in prompts}, {}
    while len(num_cached) < len(prompts):
        for step in engine.next_outputs(10):
            for output in step.outputs:
                completions[output.seq_id] += output.token_ids
                if output.finish_reason:
                    num_cached[output.seq_id] = output.usage.cached_tokens
    return completions, num_cached


def test_engines_share_prefixes_through_one_store_and_say_what_they_would_say_alone(connect):
    limits = ColdStoreLimits(max_bytes=1 << 20, max_tenant_bytes=1 << 20, chunk_bytes=300)
    store = InProcessStore(limits)
    prompts = {f"s{index}": [index % 7] * 17 + [index % 97, 5, index % 11] for index in range(120)}
    expected = {seq_id: expected_completion(p, 6, 97) for seq_id, p in prompts.items()}
    first = engine_on(connect(store))
    assert complete(first, prompts, cache_salt=b"ours")[0] == expected
    first.shutdown()
    again = connect(store)
    second = engine_on(again)
    completions, num_cached = complete(second, {"s0": prompts["s0"]}, cache_salt=b"ours")
    assert completions == {"s0": expected["s0"]}
    assert num_cached == {"s0": 16}
    assert again.counters.restored == 4
    assert complete(second, {"s0": prompts["s0"]}, cache_salt=b"theirs")[1] == {"s0": 0}
    assert complete(second, prompts, cache_salt=b"ours")[0] == expected
    store.is_down = True
    assert complete(second, prompts, cache_salt=b"ours")[0] == expected
    second.shutdown()
