"""A seeded run of random operations over tiered tables, every one of them checked."""

import random
from collections import Counter
from collections.abc import Callable

from engine.cache.formats import Format, Part
from engine.cache.tier_config import TierConfig
from engine.errors import ArenaExhausted
from tests.fakes.tiered_sequences import TieredSequence, TieredSequences

BLOCK_SIZE = 4
NUM_SLABS = {Part.KEYS: 900, Part.VALUES: 700}
MAX_OPEN = 12
MAX_TOKENS = 240
MAX_IN_FLIGHT = 3
NUM_TEXTS = 6
AUDIT_EVERY = 2_000  # operations


def small_tiers(cold_format: str) -> TierConfig:
    """The proportions of the real ones, with blocks of 4 tokens."""
    return TierConfig(
        sink_tokens=4,
        hot_tokens=8,
        warm_tokens=32,
        cell_tokens=32,
        cold_format=cold_format,
        block_size=BLOCK_SIZE,
    )


class RandomWalk:
    """Asserts what `SlabMemory` asserts after each operation; now and then audits all books and
    contents, and that whatever is free serves any format."""

    def __init__(self, config: TierConfig, seed: int) -> None:
        self.pool = TieredSequences(NUM_SLABS[Part.KEYS], NUM_SLABS[Part.VALUES], config)
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._epochs = self.pool.arenas.epochs
        self._texts = self._make_texts()
        self._closed: list[TieredSequence] = []
        self._operations = {
            self._prefill: 30,
            self._decode: 40,
            self._open: 8,
            self._finish_step: 12,
            self._begin_step: 12,
            self._register: 8,
            self._close: 4,
            self._take_up_again: 1,
        }

    def run(self, num_operations: int) -> None:
        choose, operations = self._random.choices, list(self._operations)
        weights = list(self._operations.values())
        for operation in choose(operations, weights, k=num_operations):
            self.counts[operation.__name__.strip("_")] += 1
            operation()
            self.counts["operations"] += 1
            if self.counts["operations"] % AUDIT_EVERY == 0:
                self.audit()

    def _make_texts(self) -> list[list[int]]:
        """Which share their beginnings, some more and some less."""
        trunk = self._random.choices(range(50), k=MAX_TOKENS)
        cuts = [self._random.randrange(MAX_TOKENS) for _ in range(NUM_TEXTS)]
        return [trunk[:cut] + self._random.choices(range(50), k=MAX_TOKENS - cut) for cut in cuts]

    def _open(self) -> None:
        if len(self.pool.open_ones) >= MAX_OPEN:
            return self._close()
        text = self._random.choice(self._texts)
        num_tokens = self._random.randrange(1, MAX_TOKENS)
        tenant = self._random.choice([b"ours", b"ours", b"theirs"])
        sequence = self.pool.open(text[:num_tokens], tenant)
        sequence.text = text
        self.counts["shared blocks"] += 2 * sequence.table.num_blocks
        return None

    def _prefill(self) -> None:
        prefilling = [s for s in self.pool.open_ones if s.is_prefilling]
        if not prefilling:
            return self._open()
        sequence = self._random.choice(prefilling)
        return self._extend(lambda: self.pool.plan_prefill(sequence, self._chunk()))

    def _chunk(self) -> int:
        return self._random.choice([1, 3, 8, 20, 32, 50, 100])

    def _decode(self) -> None:
        decoding = [
            s
            for s in self.pool.open_ones
            if not s.is_prefilling and s.table.num_tokens < MAX_TOKENS
        ]
        if not decoding:
            return self._prefill()
        sequence = self._random.choice(decoding)
        if sequence.num_left == 0:
            token_id = sequence.text[len(sequence.token_ids)]
            sequence.append([token_id], are_pending=self._random.random() < 0.5)
        return self._extend(lambda: self.pool.plan_decode(sequence))

    def _extend(self, plan: Callable[[], object]) -> None:
        if not self._epochs.is_in_flight:
            self._epochs.begin()
        try:
            plan()
        except ArenaExhausted:
            self.counts["exhausted"] += 1
            self._close()

    def _begin_step(self) -> None:
        if self._epochs.begun - self._epochs.finished < MAX_IN_FLIGHT:
            self._epochs.begin()

    def _finish_step(self) -> None:
        if self._epochs.is_in_flight:
            self._epochs.finish(self._epochs.finished + 1)

    def _register(self) -> None:
        if self.pool.open_ones:
            self.pool.register(self._random.choice(self.pool.open_ones))

    def _close(self) -> None:
        """Finished or aborted, in whatever state, steps in flight or not."""
        if self.pool.open_ones:
            sequence = self._random.choice(self.pool.open_ones)
            self.pool.close(sequence)
            self._closed = [*self._closed[-5:], sequence]

    def _take_up_again(self) -> None:
        decoded = [s for s in self._closed if s.addresses.decode_start is not None]
        if decoded and len(self.pool.open_ones) < MAX_OPEN:
            again = self.pool.resume(self._random.choice(decoded))
            self.counts["taken up again"] += again is not None

    def audit(self) -> None:
        self.counts["audits"] += 1
        self.pool.check()
        if self.counts["audits"] % 5 == 0:
            self.pool.check_any_slab_serves_any_format(self._random.choice(list(Format)))
            self.pool.check()
