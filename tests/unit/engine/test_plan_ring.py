import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from engine.errors import IntegrityError, RankLost
from engine.ranks.plan_ring import PlanReader, PlanRing, ring_capacity

CHILD = """
import pickle, sys
from engine.ranks.plan_ring import PlanReader
reader = PlanReader(pickle.loads(bytes.fromhex(sys.argv[1])), 0)
print("attached", flush=True)
while True:
    print(len(reader.read()), flush=True)
"""


@pytest.fixture
def ring():
    ring = PlanRing(2, 256, timeout_s=0.3)
    yield ring
    ring.close()


@pytest.fixture
def readers(ring):
    readers = [PlanReader(ring.address, index) for index in range(2)]
    ring.seal()
    yield readers
    for reader in readers:
        reader.close()


def child(ring: PlanRing) -> subprocess.Popen[str]:
    address = pickle.dumps(ring.address).hex()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "attached\n"
    return process


def test_every_reader_gets_every_plan_in_order(ring, readers):
    """Many times around the ring, at sizes that never divide it."""
    plans = [random.Random(n).randbytes(n * 37 % 240) for n in range(400)]
    got: list[list[bytes]] = [[], []]

    def read(index: int) -> None:
        for _ in plans:
            got[index].append(readers[index].read())

    threads = [threading.Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for plan in plans:
        ring.publish(plan)
    for thread in threads:
        thread.join(10)
    assert got == [plans, plans]


def test_the_writer_runs_ahead_by_the_ring_and_no_further(ring, readers):
    for number in range(4):
        ring.publish(bytes([number]) * 56)
    assert readers[0].read() == bytes(56)
    with pytest.raises(RankLost, match=r"no plan for 0 s"):  # the other has read nothing
        ring.publish(b"one too many")
    assert readers[1].read() == bytes(56)
    ring.publish(bytes(56))
    assert [readers[1].read()[:1] for _ in range(4)] == [b"\1", b"\2", b"\3", b"\0"]


def test_a_plan_out_of_order_is_noticed(ring, readers):
    ring.publish(b"one")
    readers[0]._number = 5
    with pytest.raises(IntegrityError, match="plan 0 came, expected plan 5"):
        readers[0].read()


def test_readers_read_to_the_end_of_a_closed_ring(ring, readers):
    ring.publish(b"last")
    ring.close()
    assert readers[1].read() == b"last"
    with pytest.raises(RankLost, match="rank 0 is gone"):
        readers[1].read()


def test_a_reader_that_left_is_noticed_at_the_next_plan(ring, readers):
    readers[1].close()
    with pytest.raises(RankLost, match="rank 2 is gone"):
        ring.publish(b"plan")


def test_a_killed_reader_is_noticed_also_by_a_writer_that_waits():
    ring = PlanRing(1, 256, timeout_s=30.0)
    process = child(ring)
    try:
        ring.seal()
        os.kill(process.pid, signal.SIGSTOP)
        ring.publish(bytes(200))
        killer = threading.Timer(0.2, process.kill)
        killer.start()
        started_s = time.monotonic()
        with pytest.raises(RankLost, match="rank 1 is gone"):
            ring.publish(bytes(200))
        assert time.monotonic() - started_s < 5
    finally:
        process.kill()
        process.communicate()
        ring.close()


def test_a_reader_learns_of_the_writers_death_and_nothing_has_a_name():
    before = set(os.listdir("/dev/shm"))
    ring = PlanRing(1, 1024)
    process = child(ring)
    ring.seal()
    ring.publish(bytes(77))
    assert process.stdout.readline() == "77\n"
    assert set(os.listdir("/dev/shm")) == before
    ring.close()
    _, errors = process.communicate(timeout=10)
    assert "RankLost: rank 0 is gone" in errors


def test_a_ring_that_is_not_there_is_refused(ring):
    ring.seal()
    with pytest.raises(RankLost, match="cannot be opened"):
        PlanReader(ring.address.__class__(os.getpid(), 9999, (9998, 9999), 256), 0)


def test_the_largest_plan_fits_twice():
    capacity = ring_capacity(1000)
    ring = PlanRing(1, capacity)
    reader = PlanReader(ring.address, 0)
    ring.publish(bytes(1000))
    ring.publish(bytes(1000))
    assert len(reader.read()) == len(reader.read()) == 1000
    reader.close()
    ring.close()
