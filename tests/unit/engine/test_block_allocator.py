import time

import pytest

from engine.cache.block_allocator import BlockAllocator
from engine.cache.tiers import BlockSpill
from engine.errors import IntegrityError

HASHES = [bytes([index]) * 16 for index in range(10)]


def allocator_of(num_blocks=4, *, enable_prefix_cache=True):
    return BlockAllocator(num_blocks, 64, enable_prefix_cache)


def cached_chain(allocator, hashes):
    """A finished sequence whose full blocks have these hashes."""
    table = allocator.allocate(len(hashes))
    for block_id, block_hash in zip(table, hashes, strict=True):
        allocator.register(block_id, block_hash)
    allocator.free(table)
    return table


def test_blocks_are_counted_by_token():
    assert [allocator_of().num_blocks_for(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


def test_allocate_and_free_move_the_counts():
    allocator = allocator_of()
    table = allocator.allocate(3)
    assert len(set(table)) == 3
    assert (allocator.num_free_blocks, allocator.num_referenced_blocks) == (1, 3)
    allocator.free(table)
    assert (allocator.num_free_blocks, allocator.num_referenced_blocks) == (4, 0)


def test_match_returns_the_longest_cached_head():
    allocator = allocator_of()
    table = cached_chain(allocator, HASHES[:3])
    assert allocator.match_prefix(HASHES[:2]) == table[:2]
    assert allocator.match_prefix([HASHES[0], HASHES[9], HASHES[2]]) == table[:1]
    assert allocator.match_prefix([HASHES[9], HASHES[0]]) == []
    assert allocator.num_free_blocks == 4


def test_shared_blocks_survive_their_first_owner():
    allocator = allocator_of()
    table = allocator.allocate(1)
    allocator.register(table[0], HASHES[0])
    allocator.acquire(allocator.match_prefix(HASHES[:1]))
    allocator.free(table)
    assert allocator.num_referenced_blocks == 1
    allocator.check_integrity([table])


def test_cached_blocks_are_evicted_only_when_no_other_is_free():
    allocator = allocator_of()
    cached_chain(allocator, HASHES[:2])
    allocator.allocate(2)
    assert allocator.num_cached_blocks == 2
    allocator.allocate(1)
    assert allocator.num_cached_blocks == 1


def test_tail_of_a_chain_is_evicted_before_its_head():
    allocator = allocator_of(3)
    table = cached_chain(allocator, HASHES[:3])
    allocator.allocate(1)
    assert allocator.match_prefix(HASHES[:3]) == table[:2]


def test_least_recently_used_chain_is_evicted_first():
    allocator = allocator_of(2)
    cached_chain(allocator, HASHES[:1])
    cached_chain(allocator, HASHES[1:2])
    used = allocator.match_prefix(HASHES[:1])
    allocator.acquire(used)
    allocator.free(used)
    allocator.allocate(1)
    assert allocator.match_prefix(HASHES[:1]) == used
    assert allocator.match_prefix(HASHES[1:2]) == []


def test_first_block_of_a_hash_stays_the_canonical_one():
    allocator = allocator_of()
    first, twin = allocator.allocate(2)
    allocator.register(first, HASHES[0])
    allocator.register(twin, HASHES[0])
    assert allocator.match_prefix(HASHES[:1]) == [first]
    assert allocator.hash_of(twin) is None
    allocator.free([twin])
    allocator.check_integrity([[first]])


def test_without_prefix_cache_nothing_is_kept():
    allocator = allocator_of(enable_prefix_cache=False)
    cached_chain(allocator, HASHES[:3])
    assert allocator.num_cached_blocks == 0
    assert allocator.match_prefix(HASHES[:3]) == []


def test_only_what_is_there_can_be_taken_or_given_back():
    allocator = allocator_of()
    table = allocator.allocate(4)
    with pytest.raises(AssertionError):
        allocator.allocate(1)
    with pytest.raises(AssertionError, match="not shareable"):
        allocator.acquire(table)
    allocator.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(table)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda a: a._ref_counts.__setitem__(0, 2), "block 0 counts 2 references, tables hold 1"),
        (lambda a: a._free.append(a._free[0]), "twice on the free list"),
        (lambda a: a._free.pop(), "are not the pool's 4"),
        (lambda a: a._free.__setitem__(0, 0), "free block 0 is referenced"),
        (lambda a: a._hash_of.__setitem__(3, HASHES[5]), "free block 3 has a hash"),
        (lambda a: a._hash_of.__setitem__(1, None), "evictable block 1 has no hash"),
        (lambda a: a._hash_of.__setitem__(1, HASHES[5]), "is block 1, the block disagrees"),
        (lambda a: a._block_of.clear(), "1 blocks have a hash, the prefix map knows 0"),
    ],
)
def test_check_integrity_names_what_disagrees(damage, complaint):
    allocator = allocator_of()
    assert sorted(allocator.allocate(2)) == [0, 1]
    allocator.register(1, HASHES[1])
    allocator.free([1])
    allocator.check_integrity([[0]])
    damage(allocator)
    with pytest.raises(IntegrityError, match=complaint):
        allocator.check_integrity([[0]])


def test_a_block_costs_well_under_a_microsecond():
    allocator = allocator_of(1 << 14)
    best_s = min(timed_round(allocator, 1 << 12) for _ in range(20))
    assert best_s / (1 << 12) < 1e-6


def timed_round(allocator, num_blocks):
    started_s = time.perf_counter()
    allocator.free(allocator.allocate(num_blocks))
    return time.perf_counter() - started_s


def test_evicted_blocks_are_told_once_with_hash_and_tenant():
    allocator = allocator_of(3)
    (first,) = cached_chain(allocator, HASHES[:1])
    owned = allocator.allocate(1)
    allocator.register(owned[0], HASHES[1], b"tenant")
    allocator.free(owned)
    allocator.allocate(1)
    assert allocator.take_evicted() == ()
    allocator.allocate(2)
    assert allocator.take_evicted() == (
        BlockSpill(first, HASHES[0], b""),
        BlockSpill(owned[0], HASHES[1], b"tenant"),
    )
    assert allocator.take_evicted() == ()
