"""The scheduler with a cache that ages, under anything: whatever is added, aborted, preempted and
found again, with one step planned ahead or none, every sequence reads what follows from its tokens,
no slab is given away too early, and nothing is lost."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize

from engine.cache.kv_arenas import KvArenas
from engine.cache.spill import Restores
from engine.cache.tier_config import TierConfig
from engine.config import SchedulerConfig
from engine.errors import CacheTooSmall
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.tenure import ArenaGroup
from engine.scheduling.tiered_space import TieredSpace
from tests.fakes.tiered_executor import TieredFakeExecutor
from tests.property.test_scheduler_machine import VOCAB_SIZE, SchedulerMachine

BLOCK_SIZE = 4
SMALL_TIERS = {"sink_tokens": 4, "block_size": BLOCK_SIZE}


class TieredSchedulerMachine(SchedulerMachine):
    max_model_len = 40

    @initialize(
        num_spare_slabs=st.integers(0, 12),
        max_num_sequences=st.sampled_from([1, 2, 3, 5]),
        num_spare_tokens=st.sampled_from([0, 1, 4, 12, 40]),
        enable_prefix_cache=st.sampled_from([True, True, False]),
        replays_decodes=st.booleans(),
        cold_formats=st.sampled_from([("k8v4",), ("int4",), ("int8",), ("int4", "k8v4")]),
        hot_tokens=st.sampled_from([4, 8]),
        warm_tokens=st.sampled_from([0, 4, 8]),
        cell_tokens=st.sampled_from([4, 8]),
        itl_budget_ms=st.sampled_from([None, None, None, 0.001, 5.0]),
    )
    def start(
        self,
        num_spare_slabs,
        max_num_sequences,
        num_spare_tokens,
        enable_prefix_cache,
        replays_decodes,
        cold_formats,
        hot_tokens,
        warm_tokens,
        cell_tokens,
        itl_budget_ms,
    ):
        self.config = SchedulerConfig(
            max_num_sequences, max_num_sequences + num_spare_tokens, itl_budget_ms
        )
        tiers = [
            TierConfig(
                cold_format=cold_format,
                hot_tokens=hot_tokens,
                warm_tokens=warm_tokens,
                cell_tokens=cell_tokens,
                **SMALL_TIERS,
            )
            for cold_format in cold_formats
        ]
        self.space = self.smallest_space(
            tiers,
            num_spare_slabs,
            enable_prefix_cache=enable_prefix_cache,
            replays_decodes=replays_decodes,
        )
        self.scheduler = Scheduler(self.config, self.space, self.max_model_len)
        self.executor = TieredFakeExecutor(self.space._groups, vocab_size=VOCAB_SIZE)
        self.now_s = 0.0
        self.tier = None
        self.restores = Restores()
        self.max_restores = 0
        self.sequences = []
        self.received = {}
        self.in_flight = []

    def smallest_space(self, tiers, num_spare_slabs, **options):
        """With room for one sequence of the full context, and `num_spare_slabs` more."""
        num_slabs = 8
        while True:
            arenas = [KvArenas.create(num_slabs, num_slabs, tiers[0])]
            arenas += [
                KvArenas.create(num_slabs, num_slabs, each, epochs=arenas[0].epochs)
                for each in tiers[1:]
            ]
            groups = [
                ArenaGroup(config, each, bytes([number]))
                for number, (config, each) in enumerate(zip(tiers, arenas, strict=True))
            ]
            space = TieredSpace(groups, b"model", **options)
            try:
                space.require_capacity(self.max_model_len)
            except CacheTooSmall:
                num_slabs += 2
                continue
            if num_spare_slabs == 0:
                return space
            num_slabs, num_spare_slabs = num_slabs + num_spare_slabs, 0

    def may_wait_for_room(self):
        return bool(self.in_flight)

    def check_restores(self, batch):
        assert not batch.restores

    def check_time(self, batch, decoding):
        """By the same budget as without tiers."""

    def check_all_is_given_back(self):
        for arena in self.space._arenas:
            assert arena.num_unreferenced_slabs == arena.num_slabs


TieredSchedulerMachine.TestCase.settings = settings(
    max_examples=400, stateful_step_count=25, deadline=None
)
TestTieredSchedulerMachine = TieredSchedulerMachine.TestCase
