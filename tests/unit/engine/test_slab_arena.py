"""Slabs come and go in batches, wait for steps that may read them, and are in one place each."""

import numpy as np
import pytest

from engine.cache.epochs import Epochs
from engine.cache.formats import Format
from engine.cache.guarded_queue import GuardedQueue
from engine.cache.slab_arena import SlabArena
from engine.errors import ArenaExhausted, IntegrityError


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def cached(arena: SlabArena, address: bytes, block_format: Format = Format.INT4) -> int:
    """A block that nobody references any more."""
    blocks = arena.allocate(1, block_format)
    arena.register(int(blocks[0]), address)
    arena.release(blocks)
    return int(blocks[0])


def test_a_block_has_as_many_slabs_as_its_format_takes() -> None:
    arena = SlabArena(21, Epochs())
    seen: set[int] = set()
    for block_format, num_slabs in ((Format.BF16, 4), (Format.INT8, 2), (Format.INT4, 1)):
        blocks = arena.allocate(3, block_format)
        slabs = arena.slabs_of(blocks, block_format)
        assert slabs.shape == (3, num_slabs)
        assert [arena.format_of(int(block)) for block in blocks] == [block_format] * 3
        assert not seen & set(slabs.ravel().tolist())
        seen |= set(slabs.ravel().tolist())
    assert seen == set(range(21))
    assert arena.num_available_slabs == 0


def test_any_free_slab_serves_any_format() -> None:
    """Every second slab is free, and nothing but whole bf16 blocks is wanted: all of it fits."""
    arena = SlabArena(64, Epochs())
    blocks = arena.allocate(64, Format.INT4)
    arena.release(blocks[::2])
    taken = arena.allocate(8, Format.BF16)
    assert arena.num_available_slabs == 0
    arena.check_integrity([*blocks[1::2].tolist(), *taken.tolist()])


def test_an_arena_of_int8_deals_pairs_of_neighbours() -> None:
    arena = SlabArena(9, Epochs(), densest=Format.INT8)
    assert arena.num_slabs == 8
    slabs = arena.slabs_of(arena.allocate(2, Format.INT8), Format.INT8)
    slabs = np.concatenate(
        (slabs, arena.slabs_of(arena.allocate(1, Format.BF16), Format.BF16).reshape(2, 2))
    )
    assert (slabs[:, 0] % 2 == 0).all()
    assert (slabs[:, 1] == slabs[:, 0] + 1).all()


def test_freed_slabs_wait_for_the_steps_in_flight() -> None:
    epochs = Epochs()
    arena = SlabArena(4, epochs)
    first = epochs.begin()
    blocks = arena.allocate(4, Format.INT4)
    second = epochs.begin()
    arena.release(blocks)
    assert arena.num_available_slabs == 0
    assert arena.num_unreferenced_slabs == 4
    epochs.finish(first)
    with pytest.raises(ArenaExhausted, match="1 slabs are needed, 0 of 4 can be had now"):
        arena.allocate(1, Format.INT4)
    epochs.finish(second)
    assert arena.num_available_slabs == 4
    arena.allocate(1, Format.BF16)


def test_cached_blocks_wait_too_before_they_are_evicted() -> None:
    epochs = Epochs()
    arena = SlabArena(2, epochs)
    old = cached(arena, b"old")
    step = epochs.begin()
    new = cached(arena, b"new")
    assert arena.num_available_slabs == 1
    with pytest.raises(ArenaExhausted):
        arena.allocate(2, Format.INT4)
    assert (arena.find(b"old"), arena.find(b"new")) == (old, new)
    epochs.finish(step)
    arena.allocate(2, Format.INT4)
    assert (arena.find(b"old"), arena.find(b"new")) == (None, None)


def test_the_longest_unused_goes_first_and_a_hit_makes_young() -> None:
    arena = SlabArena(4, Epochs(), keeps_evicted=True)
    for address in (b"a", b"b", b"c", b"d"):
        cached(arena, address)
    hit = ids(arena.find(b"a") or 0)
    arena.acquire(hit)
    arena.release(hit)
    arena.allocate(2, Format.INT4)
    assert [evicted.address for evicted in arena.take_evicted()] == [b"b", b"c"]
    assert arena.take_evicted() == ()
    assert arena.find(b"a") is not None


def test_one_eviction_of_a_large_block_serves_small_ones() -> None:
    arena = SlabArena(4, Epochs(), keeps_evicted=True)
    block = cached(arena, b"large", Format.BF16)
    taken = arena.allocate(1, Format.INT4)
    assert arena.num_available_slabs == 3
    (evicted,) = arena.take_evicted()
    assert evicted.slabs[0] == block
    assert sorted(evicted.slabs.tolist()) == [0, 1, 2, 3]
    arena.check_integrity(taken.tolist())


def test_what_was_evicted_is_told_slab_by_slab() -> None:
    arena = SlabArena(8, Epochs(), densest=Format.INT8, keeps_evicted=True)
    expected = {}
    for address, block_format in ((b"two", Format.INT8), (b"four", Format.BF16)):
        block = cached(arena, address, block_format)
        expected[address] = arena.slabs_of(ids(block), block_format).ravel().tolist()
    arena.allocate(2, Format.BF16)
    told = {evicted.address: evicted.slabs.tolist() for evicted in arena.take_evicted()}
    assert told == expected


def test_shared_blocks_stay_until_the_last_lets_go() -> None:
    arena = SlabArena(2, Epochs())
    blocks = arena.allocate(1, Format.INT8)
    arena.register(int(blocks[0]), b"shared")
    arena.acquire(blocks)
    arena.release(blocks)
    assert arena.num_available_slabs == 0
    arena.check_integrity(blocks.tolist())
    arena.release(blocks)
    assert arena.num_available_slabs == 2
    assert arena.find(b"shared") == blocks[0]


def test_a_twin_stays_private_and_is_freed_at_once() -> None:
    arena = SlabArena(2, Epochs())
    first, second = arena.allocate(1, Format.INT4), arena.allocate(1, Format.INT4)
    for block in (first, second):
        arena.register(int(block[0]), b"same")
    assert arena.address_of(int(second[0])) is None
    arena.release(second)
    assert arena.find(b"same") == first[0]
    assert arena.num_available_slabs == 1


def test_entries_of_blocks_that_are_hit_again_and_again_do_not_pile_up() -> None:
    arena = SlabArena(8, Epochs())
    for index in range(8):
        cached(arena, b"%d" % index)
    for _ in range(100):
        hit = ids(arena.find(b"3") or 0)
        arena.acquire(hit)
        arena.release(hit)
        arena.check_integrity([])
    arena.allocate(7, Format.INT4)
    assert arena.find(b"3") is not None


def test_nothing_is_taken_when_not_all_can_be_had() -> None:
    arena = SlabArena(7, Epochs())
    cached(arena, b"kept")
    with pytest.raises(ArenaExhausted):
        arena.allocate(2, Format.BF16)
    assert arena.find(b"kept") is not None
    arena.check_integrity([])


@pytest.mark.parametrize("num_refs", [0, 1])
def test_releasing_what_is_not_held_is_refused_before_anything_is_dropped(num_refs: int) -> None:
    arena = SlabArena(8, Epochs())
    kept = arena.allocate(1, Format.INT4)
    gone = arena.allocate(1, Format.INT4)
    arena.release(gone)
    with pytest.raises(IntegrityError, match=f"block {gone[0]} is released more often"):
        arena.release(np.concatenate((kept, gone)))
    arena.check_integrity(kept.tolist())


def test_only_what_has_an_address_can_be_acquired_and_only_one_address() -> None:
    arena = SlabArena(8, Epochs())
    blocks = arena.allocate(1, Format.INT4)
    with pytest.raises(IntegrityError, match="acquired without an address"):
        arena.acquire(blocks)
    arena.register(int(blocks[0]), b"one")
    with pytest.raises(IntegrityError, match="already holds"):
        arena.register(int(blocks[0]), b"other")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda arena: arena._ref_counts.__setitem__(2, 5), "block 2 counts 5 references, tables"),
        (lambda arena: arena._free.append(ids(1)), "slab 1 is 1 times free and in 1 blocks"),
        (lambda arena: arena._free.pop(1), "slab 4 is 0 times free and in 0 blocks"),
        (lambda arena: arena._num_grains_of.__setitem__(6, 1), "block 6 holds slabs for nobody"),
        (lambda arena: arena._block_of.__setitem__(b"x", 1), "the prefix map says 78 is block 1"),
        (lambda arena: arena._block_of.clear(), "the prefix map knows 0"),
        (lambda arena: arena._released_at.__setitem__(3, 9), "block 3 is cached and"),
        (lambda arena: setattr(arena, "_num_evictable_grains", 9), "the sum says 9"),
    ],
)
def test_spoiled_books_are_named(spoil, said: str) -> None:
    arena = SlabArena(8, Epochs())
    held = arena.allocate(3, Format.INT4)
    cached(arena, b"cached")
    arena.check_integrity(held.tolist())
    spoil(arena)
    with pytest.raises(IntegrityError, match=said):
        arena.check_integrity(held.tolist())


def test_a_step_that_never_began_cannot_finish() -> None:
    epochs = Epochs()
    epochs.begin()
    with pytest.raises(IntegrityError, match="step 2 is finished, but only 1 have begun"):
        epochs.finish(2)
    epochs.finish(1)
    assert not epochs.is_in_flight


def test_a_queue_wraps_and_closes_its_ranks() -> None:
    epochs = Epochs()
    queue = GuardedQueue(4, epochs)
    queue.append(ids(0, 1, 2))
    assert queue.pop(2).tolist() == [0, 1]
    epochs.begin()
    queue.append(ids(3, 4, 5))
    assert queue.peek(queue.head, queue.tail).tolist() == [2, 3, 4, 5]
    assert queue.clear - queue.head == 1
    queue.keep(np.array([True, False, True, True]))
    assert queue.peek(queue.head, queue.tail).tolist() == [2, 4, 5]
    assert queue.clear - queue.head == 1
    queue.prepend(ids(9))
    assert queue.clear - queue.head == 2
    epochs.finish(1)
    assert queue.pop(queue.clear - queue.head).tolist() == [9, 2, 4, 5]
    with pytest.raises(IntegrityError, match="5 ids behind 0 are more than the 4"):
        queue.append(ids(1, 2, 3, 4, 5))
