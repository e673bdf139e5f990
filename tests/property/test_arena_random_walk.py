"""A short stretch of the walk that `python -m benchmarks.kv_arena` takes over a million steps."""

import pytest

from benchmarks.kv_arena.random_walk import RandomWalk, small_tiers

NUM_OPERATIONS = 6_000


@pytest.mark.parametrize("cold_format", ["k8v4", "int4", "int8"])
def test_random_operations_break_no_rule(cold_format):
    walk = RandomWalk(small_tiers(cold_format), seed=20)
    walk.run(NUM_OPERATIONS)
    walk.audit()
    assert walk.counts["operations"] == NUM_OPERATIONS
    for what in ("exhausted", "taken up again", "shared blocks", "audits"):
        assert walk.counts[what] > 0
    assert walk.pool.memory.num_blocks_copied > 1_000
