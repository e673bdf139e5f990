"""Tiered tables over slab arenas under anything: whatever is prefilled, decoded, shared, demoted,
aborted or taken up again, with any steps in flight, no slab is in two places or given away while a
step may read it, nothing fragments, and an address means one content."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.formats import Format, Part
from engine.cache.tier_config import TierConfig
from engine.errors import ArenaExhausted
from tests.fakes.tiered_sequences import TieredSequences

STEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
TEXTS = [STEM * 20, [*STEM, 0] * 20]  # which token comes next, whether read or sampled
CONFIGS = [
    TierConfig(False, 2, 4, 8, 8, cold_format, block_size=2)
    for cold_format in ("k8v4", "int4", "int8")
]
CONFIGS += [
    TierConfig(exact=True, block_size=2),
    TierConfig(False, 0, 2, 0, 4, "k8v4", block_size=2),
]
MAX_TOKENS = 150


class SlabArenaMachine(RuleBasedStateMachine):
    @initialize(
        config=st.sampled_from(CONFIGS),
        num_key_slabs=st.sampled_from([120, 400, 1_200]),
        num_value_slabs=st.sampled_from([120, 400, 1_200]),
    )
    def start(self, config, num_key_slabs, num_value_slabs):
        self.pool = TieredSequences(num_key_slabs, num_value_slabs, config)
        self.epochs = self.pool.arenas.epochs
        self.closed = []

    @precondition(lambda self: len(self.pool.open_ones) < 4)
    @rule(
        text=st.sampled_from(TEXTS),
        num_tokens=st.sampled_from([1, 9, 16, 24, 30, 31, 44, 60]),
        tenant=st.sampled_from([b"ours", b"ours", b"ours", b"theirs"]),
        num_steps=st.sampled_from([0, 1, 3, 40, 90]),
        chunk=st.integers(1, 60),
    )
    def open(self, text, num_tokens, tenant, num_steps, chunk):
        sequence = self.pool.open(text[:num_tokens], tenant)
        sequence.text = text
        assert sequence.num_left > 0
        self.step(num_steps, chunk, 1, True, True)

    @precondition(lambda self: self.pool.open_ones)
    @rule(
        num_steps=st.integers(1, 30),
        chunk=st.integers(1, 30),
        num_ahead=st.integers(0, 2),
        is_known_at_once=st.booleans(),
        are_registered=st.sampled_from([True, True, False]),
    )
    def step(self, num_steps, chunk, num_ahead, is_known_at_once, are_registered):
        """A chunk or a token for everybody, and some steps still in flight at the end."""
        for _ in range(num_steps):
            self.epochs.begin()
            for sequence in list(self.pool.open_ones):
                self.extend(sequence, chunk, is_known_at_once)
            self.epochs.finish(max(self.epochs.finished, self.epochs.begun - num_ahead))
            if are_registered:
                self.register_all()

    def extend(self, sequence, chunk, is_known_at_once):
        """All or nothing. What a step in flight samples may be known later."""
        table = sequence.table
        if sequence.num_left == 0 and table.num_tokens < MAX_TOKENS:
            token_id = sequence.text[table.num_tokens]
            sequence.append([token_id], are_pending=not is_known_at_once)
        is_prefill = sequence.is_prefilling
        before = table.num_tokens, table.ages, [table.blocks(part) for part in Part]
        try:
            if is_prefill:
                self.pool.plan_prefill(sequence, chunk)
            elif sequence.num_left:
                self.pool.plan_decode(sequence)
        except ArenaExhausted:
            after = table.num_tokens, table.ages, [table.blocks(part) for part in Part]
            assert after == before or (is_prefill and table.num_tokens > before[0])

    @precondition(lambda self: self.epochs.is_in_flight)
    @rule()
    def finish_oldest_step(self):
        self.epochs.finish(self.epochs.finished + 1)

    @precondition(lambda self: self.pool.open_ones)
    @rule()
    def register_all(self):
        for sequence in self.pool.open_ones:
            self.pool.register(sequence)

    @precondition(lambda self: self.pool.open_ones)
    @rule(draw=st.data())
    def finish_or_abort(self, draw):
        sequence = draw.draw(st.sampled_from(self.pool.open_ones))
        self.pool.close(sequence)
        self.closed.append(sequence)

    @precondition(lambda self: any(s.addresses.decode_start is not None for s in self.closed))
    @rule(draw=st.data())
    def take_up_again(self, draw):
        decoded = [s for s in self.closed if s.addresses.decode_start is not None]
        self.pool.resume(draw.draw(st.sampled_from(decoded)))

    @rule(part=st.sampled_from(Part), num_slabs=st.integers(1, 90))
    def evict_some(self, part, num_slabs):
        arena = self.pool.arenas.of(part)
        num_blocks = min(num_slabs, arena.num_available_slabs) // arena.grain
        arena.release(arena.allocate(num_blocks, arena.densest))

    @precondition(lambda self: not self.pool.open_ones)
    @rule(block_format=st.sampled_from(Format))
    def take_all_that_is_free(self, block_format):
        self.pool.check_any_slab_serves_any_format(block_format)

    @invariant()
    def books_agree(self):
        self.pool.check()

    def teardown(self):
        if hasattr(self, "pool"):
            self.pool.check_any_slab_serves_any_format(Format.INT8)
            for sequence in list(self.pool.open_ones):
                self.pool.close(sequence)
            self.pool.check()
            self.pool.check_any_slab_serves_any_format(Format.BF16)


SlabArenaMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None
)
TestSlabArenaMachine = SlabArenaMachine.TestCase
