"""The allocator against a model that keeps only tables and the tokens each block was given."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.block_allocator import BlockAllocator
from engine.cache.block_hash import extend_chain, root_hash

BLOCK_SIZE = 2
SALTS = [b"ours", b"theirs"]


class BlockAllocatorMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 12), enable_prefix_cache=st.booleans())
    def start(self, num_blocks, enable_prefix_cache):
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE, enable_prefix_cache)
        self.tables: list[list[int]] = []
        self.content: dict[int, tuple] = {}  # block -> what its owner wrote last
        self.hashed: dict[int, tuple[bytes, bytes]] = {}  # block -> its hash and whose it is

    @rule(
        token_ids=st.lists(st.integers(0, 1), max_size=12),
        salt=st.sampled_from(SALTS),
        is_computed=st.booleans(),
    )
    def open_table(self, token_ids, salt, is_computed):
        """A whole sequence: hits first, new blocks for the rest, registered once computed."""
        chain: list[bytes] = []
        extend_chain(chain, root_hash(b"model", salt), token_ids, BLOCK_SIZE)
        hits = self.allocator.match_prefix(chain)
        num_missing = self.allocator.num_blocks_for(len(token_ids)) - len(hits)
        num_taken = num_missing + len(hits) - self.allocator.num_referenced(hits)
        if num_taken > self.allocator.num_free_blocks:
            return
        for index, block_id in enumerate(hits):
            assert self.content[block_id] == (salt, *token_ids[: (index + 1) * BLOCK_SIZE])
        num_free = self.allocator.num_free_blocks
        self.allocator.acquire(hits)
        table = hits + self.allocator.allocate(num_missing)
        self.check_evicted(table)
        assert self.allocator.num_free_blocks == num_free - num_taken
        assert len(set(table)) == len(table)
        self.tables.append(table)
        for index in range(len(hits), len(table)):
            self.content[table[index]] = (salt, *token_ids[: (index + 1) * BLOCK_SIZE])
            if is_computed and index < len(chain):
                self.allocator.register(table[index], chain[index], salt)
                if self.allocator.hash_of(table[index]) is not None:
                    self.hashed[table[index]] = chain[index], salt

    @rule(num_blocks=st.integers(0, 4))
    def grow(self, num_blocks):
        if self.tables and num_blocks <= self.allocator.num_free_blocks:
            taken = self.allocator.allocate(num_blocks)
            self.check_evicted(taken)
            assert not set(taken) & {block for table in self.tables for block in table}
            for block_id in taken:
                self.content[block_id] = ()
            self.tables[-1] += taken

    @precondition(lambda self: self.tables)
    @rule(draw=st.data())
    def close_table(self, draw):
        table = self.tables.pop(draw.draw(st.integers(0, len(self.tables) - 1)))
        self.allocator.free(table)

    def check_evicted(self, taken):
        """Told once, with the hash and the tenant it was registered under, and taken at once."""
        for spill in self.allocator.take_evicted():
            assert self.hashed.pop(spill.block_id) == (spill.block_hash, spill.tenant)
            assert spill.block_id in taken
        assert self.allocator.take_evicted() == ()

    @invariant()
    def books_agree(self):
        self.allocator.check_integrity(self.tables)
        num_referenced = len({block for table in self.tables for block in table})
        assert self.allocator.num_referenced_blocks == num_referenced
        assert self.allocator.num_free_blocks == self.allocator.num_blocks - num_referenced
        assert self.allocator.num_cached_blocks == len(self.hashed)

    def teardown(self):
        if hasattr(self, "allocator"):
            for table in self.tables:
                self.allocator.free(table)
            self.allocator.check_integrity([])
            assert self.allocator.num_referenced_blocks == 0
            everything = self.allocator.allocate(self.allocator.num_blocks)
            self.check_evicted(everything)
            assert len(set(everything)) == self.allocator.num_blocks
            assert self.hashed == {}
            assert self.allocator.num_cached_blocks == 0


BlockAllocatorMachine.TestCase.settings = settings(
    max_examples=2_000, stateful_step_count=25, deadline=None
)
TestBlockAllocatorMachine = BlockAllocatorMachine.TestCase
