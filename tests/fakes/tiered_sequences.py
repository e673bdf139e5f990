"""Sequences over two arenas and a memory behind them, a step each time they are extended."""

from functools import partial

from engine.cache.block_address import SequenceAddresses
from engine.cache.block_hash import extend_chain, root_hash
from engine.cache.formats import Format, Part
from engine.cache.kv_arenas import KvArenas
from engine.cache.prefix_match import PrefixMatcher
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_table import Span, TieredTable, check_arenas
from tests.fakes.slab_memory import SlabMemory, StoredSequence


class TieredSequence(StoredSequence):
    """What a scheduler would do with one sequence. Its tokens are known before they are stored."""

    def __init__(
        self, pool: "TieredSequences", token_ids: list[int], tenant: bytes, decode_start: int | None
    ) -> None:
        self.text = token_ids  # with what is still to come
        self.num_prompt_tokens = len(token_ids)
        self._chain: list[bytes] = []
        self._root = root_hash(b"model", tenant)
        self._block_size = pool.config.block_size
        self.tenant = tenant
        self.addresses = SequenceAddresses(
            b"version", self._chain, tenant, self._block_size, decode_start
        )
        super().__init__(TieredTable(pool.arenas, pool.config, self.addresses), [])
        self.append(token_ids)

    @property
    def is_prefilling(self) -> bool:
        is_in_prompt = self.table.num_tokens < self.num_prompt_tokens
        return is_in_prompt and self.addresses.decode_start is None

    def append(self, token_ids: list[int], *, are_pending: bool = False) -> None:
        """Pending tokens are not hashed before more come that are not."""
        self.token_ids += token_ids
        if not are_pending:
            extend_chain(self._chain, self._root, self.token_ids, self._block_size)

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.table.num_tokens


class TieredSequences:
    def __init__(self, num_key_slabs: int, num_value_slabs: int, config: TierConfig) -> None:
        self.config = config
        self.arenas = KvArenas.create(num_key_slabs, num_value_slabs, config)
        self.memory = SlabMemory(self.arenas, config)
        self.open_ones: list[TieredSequence] = []

    def open(self, token_ids: list[int], tenant: bytes = b"ours") -> TieredSequence:
        """A prompt, with what of it is cached; never all of it."""
        sequence = TieredSequence(self, token_ids, tenant, None)
        matcher = PrefixMatcher(self.arenas, self.config, sequence.addresses)
        match = matcher.match_prompt((len(token_ids) - 1) // self.config.block_size)
        sequence.table.adopt(match.keys, match.values, match.ages)
        self.memory.adopt(sequence)
        self.open_ones.append(sequence)
        return sequence

    def resume(self, earlier: TieredSequence) -> TieredSequence | None:
        """Decode on where the closed one was, if its tail is still there."""
        addresses = earlier.addresses
        again = TieredSequence(self, earlier.token_ids, earlier.tenant, addresses.decode_start)
        again.text, again.num_prompt_tokens = earlier.text, earlier.num_prompt_tokens
        match = PrefixMatcher(self.arenas, self.config, again.addresses).match_decoded(
            len(earlier.token_ids) // self.config.block_size
        )
        if match is None:
            return None
        again.table.adopt(match.keys, match.values, match.ages)
        self.memory.adopt(again)
        self.open_ones.append(again)
        return again

    def prefill(self, sequence: TieredSequence, num_tokens: int) -> list[Span]:
        """A chunk in a step that is done when this returns."""
        epoch = self.arenas.epochs.begin()
        spans = self.plan_prefill(sequence, num_tokens)
        self.arenas.epochs.finish(epoch)
        self.register(sequence)
        return spans

    def decode(self, sequence: TieredSequence, num_tokens: int) -> None:
        """One token a step."""
        for _ in range(min(num_tokens, sequence.num_left)):
            epoch = self.arenas.epochs.begin()
            self.plan_decode(sequence)
            self.arenas.epochs.finish(epoch)
            self.register(sequence)

    def plan_prefill(self, sequence: TieredSequence, num_tokens: int) -> list[Span]:
        """In the step that is begun, as far as there is room. Raises ArenaExhausted."""
        end = min(sequence.table.num_tokens + num_tokens, len(sequence.token_ids))
        spans = []
        while (num_missing := end - sequence.table.num_tokens) > 0:
            plan = partial(sequence.table.extend_prefill, num_missing)
            spans.append(self.memory.extend(sequence, plan))
        return spans

    def plan_decode(self, sequence: TieredSequence) -> Span:
        return self.memory.extend(sequence, sequence.table.extend_decode)

    def register(self, sequence: TieredSequence) -> None:
        sequence.table.register_filled()
        self.memory.check(sequence)

    def close(self, sequence: TieredSequence) -> None:
        sequence.table.close()
        self.open_ones.remove(sequence)

    def check(self) -> None:
        """The books, the contents, and that nobody holds a block more than its tokens fill."""
        check_arenas(self.arenas, [sequence.table for sequence in self.open_ones])
        for sequence in self.open_ones:
            self.memory.check(sequence)
            num_tokens, block_size = sequence.table.num_tokens, self.config.block_size
            assert sequence.table.num_blocks == -(-num_tokens // block_size)
        for part in Part:
            arena = self.arenas.of(part)
            held = {
                slab
                for sequence in self.open_ones
                for slab in sequence.table.slab_ids(part).tolist()
            }
            assert arena.num_slabs - arena.num_unreferenced_slabs == len(held)

    def check_any_slab_serves_any_format(self, block_format: Format) -> None:
        """With no step in flight, all that nobody references is one allocation away. Evicts it."""
        self.arenas.epochs.finish(self.arenas.epochs.begun)
        for part in Part:
            arena = self.arenas.of(part)
            if block_format <= arena.densest:
                num_blocks = arena.num_unreferenced_slabs // block_format.num_slabs
                blocks = arena.allocate(num_blocks, block_format)
                assert arena.num_available_slabs < block_format.num_slabs
                arena.release(blocks)
