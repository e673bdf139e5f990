"""The store under anything: whatever is stored, found, leased, released, expired and discarded, it
holds to its limits, and gives back what it got."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deployments.cold_store import ChainQuery, ColdStoreLimits, PartLabel
from tests.fakes.cold_store import InProcessStore

TENANTS = st.sampled_from([b"a", b"b", b"c"])
HASHES = st.lists(st.sampled_from([bytes([i]) for i in range(12)]), min_size=1, max_size=5)
LEASE_S = 3.0


def payload_of(key):
    """Bytes and length of its own, 2 to 40."""
    tenant, block_hash, rank = key
    return (tenant + bytes([rank])) * (1 + block_hash[0] * 5 % 20)


class ColdStoreMachine(RuleBasedStateMachine):
    @initialize(
        max_bytes=st.integers(20, 200),
        max_tenant_bytes=st.integers(20, 200),
        chunk_bytes=st.sampled_from([1, 30, 90]),
    )
    def start(self, max_bytes, max_tenant_bytes, chunk_bytes):
        self.limits = ColdStoreLimits(max_bytes, max_tenant_bytes, chunk_bytes, LEASE_S)
        self.store = InProcessStore(self.limits)
        self.leases = {}  # lease id -> when it expires, its chunks

    @rule(tenant=TENANTS, hashes=HASHES, rank=st.integers(0, 1))
    def keep(self, tenant, hashes, rank):
        keys = [(tenant, block_hash, rank) for block_hash in hashes]
        labels = [PartLabel(key, len(payload_of(key)), hash(key)) for key in keys]
        content = np.frombuffer(b"".join(map(payload_of, keys)), np.uint8)
        held = self.held_chunks()
        num_kept = self.store.store(labels, content)
        assert 0 <= num_kept <= len(keys)
        if num_kept == len(keys):
            assert keys[-1] not in self.store.missing(keys)
        assert held <= self.store.actor._chunks.keys(), "a leased chunk was evicted"

    @rule(tenant=TENANTS, hashes=HASHES, num_ranks=st.integers(1, 2))
    def find(self, tenant, hashes, num_ranks):
        lease = self.store.find([ChainQuery(tenant, tuple(hashes))], num_ranks)
        (blocks,) = lease.found
        content = self.store.fetch(lease.chunks)
        for block_hash, places in zip(hashes, blocks, strict=False):
            assert len(places) == num_ranks
            for rank, place in enumerate(places):
                key = tenant, block_hash, rank
                assert place.label == PartLabel(key, len(payload_of(key)), hash(key))
                end = place.offset + place.label.num_bytes
                assert bytes(content[place.chunk_id][place.offset : end]) == payload_of(key)
        if len(blocks) < len(hashes):
            wanted = [(tenant, hashes[len(blocks)], rank) for rank in range(num_ranks)]
            assert self.store.missing(wanted)
        self.leases[lease.lease_id] = self.store.clock.now_s + LEASE_S, set(lease.chunks)

    @precondition(lambda self: self.leases)
    @rule(draw=st.data())
    def release(self, draw):
        lease_id = draw.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[lease_id]
        self.store.release(lease_id)

    @precondition(lambda self: self.leases)
    @rule(draw=st.data())
    def discard(self, draw):
        lease_id = draw.draw(st.sampled_from(sorted(self.leases)))
        chunk_ids = frozenset(self.leases[lease_id][1])
        self.store.discard(chunk_ids)
        for _, held in self.leases.values():
            held -= chunk_ids

    @rule()
    def pass_a_second(self):
        self.store.clock.now_s += 1.0

    @invariant()
    def books_agree(self):
        if not hasattr(self, "store"):
            return
        actor, stats = self.store.actor, self.store.actor.stats()
        chunks = actor._chunks.values()
        assert stats.num_bytes == sum(chunk.num_bytes for chunk in chunks) <= self.limits.max_bytes
        for tenant, num_bytes in actor._num_bytes.items():
            assert 0 < num_bytes <= self.limits.max_tenant_bytes
            assert num_bytes == sum(c.num_bytes for c in chunks if c.tenant == tenant)
        keys = [key for chunk in chunks for key in chunk.keys]
        assert len(keys) == len(set(keys)) == stats.num_parts
        assert set(keys) == set(actor._places)
        assert all(key[0] == chunk.tenant for chunk in chunks for key in chunk.keys)
        assert {c.tenant: c for c in chunks if c.ref is None} == actor._unsealed
        assert all(chunk.num_bytes < self.limits.chunk_bytes for chunk in actor._unsealed.values())

    def held_chunks(self):
        now_s = self.store.clock.now_s
        live = [held for expires_s, held in self.leases.values() if now_s < expires_s]
        return set().union(*live)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.clock.now_s += LEASE_S
            self.store.find([], 1)
            assert self.store.actor.stats().num_leases == 0
            assert all(chunk.num_leases == 0 for chunk in self.store.actor._chunks.values())


ColdStoreMachine.TestCase.settings = settings(
    max_examples=1_000, stateful_step_count=30, deadline=None
)
TestColdStoreMachine = ColdStoreMachine.TestCase
