"""The cold store as a real actor with real objects: it outlives those who spill, and its own death
is nobody's error."""

import contextlib
import os
import signal
import time

import numpy as np
import pytest
import ray

from deployments.cold_client import ColdClient
from deployments.cold_store import (
    NAME_PREFIX,
    NAMESPACE,
    ColdStore,
    ColdStoreLimits,
    cold_store_actor,
    end_cold_stores,
)
from deployments.node_stores import NodeStores, RayStore
from engine.cache.tiers import ColdBlock

pytestmark = pytest.mark.ray

BLOCK_BYTES = 256 << 10
LIMITS = ColdStoreLimits(max_bytes=64 << 20, max_tenant_bytes=32 << 20, chunk_bytes=1 << 20)
CHAIN = [bytes([index]) * 16 for index in range(256)]


class Spiller:
    """An engine's process: spills and says what it restored."""

    def __init__(self, limits):
        self._client = ColdClient(NodeStores(limits))
        self._num_tickets = 0

    def pid(self):
        return os.getpid()

    def spill(self, indices, tenant=b"ours"):
        self._client.spill([ColdBlock(tenant, CHAIN[i], payload_of(i)) for i in indices])
        assert self._client.flush(30)
        return self._client.counters

    def restore(self, indices, tenant=b"ours"):
        return restore(self._client, indices, tenant)


class WornStore(ColdStore):
    """A store whose memory decays when told."""

    def damage(self):
        chunk = next(iter(self._chunks.values()))
        content = np.array(ray.get(chunk.ref))
        content[100] ^= 1
        chunk.ref = ray.put(content)

    def lose(self):
        """As if the object's owner had died: what Ray says when it was lost everywhere."""
        owner = ray.remote(Owner).options(num_cpus=0).remote()
        for chunk in self._chunks.values():
            (chunk.ref,) = ray.get(owner.put.remote(ray.get(chunk.ref)))
        os.kill(ray.get(owner.pid.remote()), signal.SIGKILL)
        for chunk in self._chunks.values():
            until(lambda ref=chunk.ref: _is_lost(ref))


class Owner:
    def put(self, content):
        return [ray.put(content)]

    def pid(self):
        return os.getpid()


def payload_of(index):
    return np.random.default_rng(index).bytes(BLOCK_BYTES)


def restore(client, indices, tenant=b"ours", ticket=[0]):  # noqa: B006 - tickets count up
    ticket[0] += 1
    client.request_restore(ticket[0], tenant, [CHAIN[index] for index in indices])
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        client.wait(1)
        for answer in client.poll():
            assert answer.ticket == ticket[0]
            return [bytes(payload) for (payload,) in answer.blocks]
    raise AssertionError("no answer in 30 s")


@pytest.fixture
def cluster(app):
    yield
    end_cold_stores()


@pytest.fixture
def client(cluster):
    client = ColdClient(NodeStores(LIMITS))
    yield client
    client.close()


def spiller():
    return ray.remote(Spiller).options(num_cpus=0).remote(LIMITS)


def stats():
    return ray.get(cold_store_actor(LIMITS).stats.remote())


def until(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not come true in time"
        time.sleep(0.1)


def test_blocks_outlive_the_process_that_spilled_them(client):
    engine = spiller()
    assert ray.get(engine.spill.remote(range(10))).spilled == 10
    os.kill(ray.get(engine.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(engine.pid.remote())
    assert restore(client, range(12)) == [payload_of(index) for index in range(10)]
    assert (client.counters.restored, client.counters.missed) == (10, 2)
    assert restore(client, range(10), tenant=b"theirs") == []
    again = spiller()
    assert ray.get(again.restore.remote(range(10))) == [payload_of(i) for i in range(10)]


def test_sealed_chunks_are_mapped_rather_than_copied(client):
    ray.get(spiller().spill.remote(range(4)))
    client.request_restore(10_000, b"ours", CHAIN[:4])
    until(lambda: client._answers, 10)
    ((payloads, *_),) = [answer.blocks for answer in client.poll()]
    assert payloads[0].readonly
    assert payloads[0].obj.base is not None
    assert not payloads[0].obj.flags.owndata


def test_dead_store_is_an_empty_one(client):
    engine = spiller()
    ray.get(engine.spill.remote(range(4)))
    assert len(restore(client, range(4))) == 4
    store = cold_store_actor(LIMITS)
    ray.kill(store, no_restart=False)
    until(lambda: restore(client, range(4)) == [])
    until(lambda: _num_parts(store) == 0)
    until(lambda: ray.get(engine.spill.remote(range(4))).spilled >= 8)
    until(lambda: len(restore(client, range(4))) == 4)


def _is_lost(ref):
    try:
        ray.get(ref, timeout=5)
    except ray.exceptions.ObjectLostError:
        return True
    return False


def _name():
    return f"{NAME_PREFIX}{ray.get_runtime_context().get_node_id()}"


def _num_parts(store):
    with contextlib.suppress(ray.exceptions.RayError):
        return ray.get(store.stats.remote(), timeout=5).num_parts
    return None


@pytest.mark.parametrize("fault", ["damage", "lose"])
def test_damaged_and_lost_objects_are_missed_and_counted(cluster, fault):
    store = ray.remote(WornStore).options(num_cpus=0).remote(LIMITS)
    client = ColdClient(lambda: [RayStore(lambda: store)])
    client.spill([ColdBlock(b"ours", CHAIN[i], payload_of(i)) for i in range(4)])
    assert client.flush(30)
    ray.get(getattr(store, fault).remote())
    assert restore(client, range(4)) == []
    assert (client.counters.missed, client.counters.corrupt) == (4, fault == "damage")
    until(lambda: _num_parts(store) == 0)
    client.spill([ColdBlock(b"ours", CHAIN[i], payload_of(i)) for i in range(4)])
    assert client.flush(30)
    assert len(restore(client, range(4))) == 4
    client.close()
    ray.kill(store)


def test_full_store_evicts_and_ray_frees_the_objects(client):
    engine = spiller()
    for start in range(0, 256, 32):
        ray.get(engine.spill.remote(range(start, start + 32)))
    assert stats().num_bytes <= LIMITS.max_tenant_bytes
    assert restore(client, range(32)) == []
    assert restore(client, range(224, 256)) == [payload_of(i) for i in range(224, 256)]
    assert client.counters.corrupt == 0


def test_drain_ends_the_store_and_its_name(client):
    ray.get(spiller().spill.remote(range(4)))
    end_cold_stores()
    with pytest.raises(ValueError, match="Failed to look up actor"):
        ray.get_actor(_name(), namespace=NAMESPACE)
    assert restore(client, range(4)) == []
