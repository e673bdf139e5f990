"""Shapes of steps over a cache that ages, planned without a sequence to own them."""

import numpy as np

from engine.cache.kv_arenas import KvArenas
from engine.cache.tier_config import TierConfig
from engine.scheduling.tenure import ArenaGroup
from engine.step_profile import tiered_steps

INT4, K8V4 = TierConfig(cold_format="int4"), TierConfig(cold_format="k8v4")


def groups_of(*configs, num_slabs=2_000):
    arenas = [KvArenas.create(num_slabs, num_slabs, configs[0])]
    arenas += [
        KvArenas.create(num_slabs, num_slabs, each, epochs=arenas[0].epochs) for each in configs[1:]
    ]
    pairs = zip(configs, arenas, strict=True)
    return [ArenaGroup(config, each, b"version") for config, each in pairs]


def test_a_chunk_after_a_context_has_its_spans_and_what_they_demote():
    groups = groups_of(INT4, K8V4)
    (entry,) = (batch := tiered_steps(groups)((1, 1_000, 3_000))).scheduled
    assert (entry.start, entry.num_new_tokens) == (3_000, 1_000)
    assert [(span.start, span.end) for span in entry.spans] == [
        (3_000, 3_072),
        (3_072, 3_584),
        (3_584, 4_000),
    ]
    assert [len(span.views) for span in entry.spans] == [2, 2, 2]
    assert not any(span.is_decode for span in entry.spans)
    for number, group in enumerate(groups):
        for demotion in batch.demotions[number]:
            assert demotion.target_format is group.config.cold[demotion.part]
        # Of two cells, of keys and of values.
        assert sum(len(each.targets) for each in batch.demotions[number]) == 2 * 2 * 8


def test_decodes_of_many_sequences_read_the_same_slabs():
    groups = groups_of(INT4)
    batch = tiered_steps(groups)((16, 1, 4_095))
    views = [entry.spans[0].views[0] for entry in batch.scheduled]
    assert len(views) == 16
    assert all(entry.spans[0].is_decode for entry in batch.scheduled)
    assert views[0].bounds == (64, 3_392, 3_904, 4_096)
    for view in views:
        assert np.array_equal(view.key_slabs, views[0].key_slabs)
    assert batch.demotions == ((),)


def test_a_step_leaves_nothing_behind():
    groups = groups_of(INT4, num_slabs=300)
    plan = tiered_steps(groups)
    for shape in [(1, 2_000, 0), (1, 1, 0), (4, 1, 2_500), (1, 700, 1_800)] * 3:
        assert plan(shape).scheduled
        for arena in (groups[0].arenas.keys, groups[0].arenas.values):
            assert arena.num_unreferenced_slabs == 300
