"""Which blocks of the KV pool are free, shared or worth keeping. Knows ids, never tensors."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from engine.cache.tiers import BlockSpill
from engine.errors import IntegrityError


class BlockAllocator:
    """Reference-counted blocks of one pool, with a prefix cache over the full ones.

    A block is in exactly one place: on the free list (content worthless), cached and unreferenced
    (hashed, evictable), or referenced by as many block tables as its count says. Only full blocks
    are hashed, and only hashed blocks are shared. Not thread-safe: the scheduler owns it.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._tenant_of = [b""] * num_blocks  # of the hashed ones
        self._block_of: dict[bytes, int] = {}
        self._evicted: list[BlockSpill] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can give: free or evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def num_referenced_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that `match_prefix` can find, referenced or not."""
        return len(self._block_of)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` <= `num_free_blocks` blocks, each with one reference."""
        assert num_blocks <= self.num_free_blocks, (num_blocks, self.num_free_blocks)
        self._evict(num_blocks - len(self._free))
        split = len(self._free) - num_blocks
        block_ids = self._free[split:]
        del self._free[split:]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached head of the chain. Takes no references, so the answer is
        good only until the next `allocate`."""
        block_ids = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_referenced(self, block_ids: Iterable[int]) -> int:
        """How many of `block_ids` can be shared without taking anything from the free ones."""
        return sum(self._ref_counts[block_id] > 0 for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each of these cached blocks."""
        for block_id in block_ids:
            assert self._hash_of[block_id] is not None, f"block {block_id} is not shareable"
            if self._ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self._ref_counts[block_id] += 1

    def register(self, block_id: int, block_hash: bytes, tenant: bytes = b"") -> None:
        """The referenced block is full and computed. The first block of a hash is the canonical
        one; a later twin stays private to its owner. `tenant` is whose quota it fills elsewhere."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
        if not self.enable_prefix_cache or block_hash in self._block_of:
            return
        assert self._hash_of[block_id] is None, f"block {block_id} already has a hash"
        self._hash_of[block_id] = block_hash
        self._tenant_of[block_id] = tenant
        self._block_of[block_hash] = block_id

    def take_evicted(self) -> tuple[BlockSpill, ...]:
        """What `allocate` has evicted since the last call: the memory of these blocks is intact
        until their new owners compute."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def cached(self) -> tuple[BlockSpill, ...]:
        """The unreferenced cached blocks, most recently used first, heads before their tails."""
        return tuple(self._as_spill(block_id) for block_id in reversed(self._evictable))

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hash_of[block_id]

    def free(self, block_table: list[int]) -> None:
        """Drop one reference of each block of a table. Hashed blocks stay cached.

        A chain is useless without its head, so the tail becomes evictable first.
        """
        for block_id in reversed(block_table):
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} is freed twice"
            self._ref_counts[block_id] = count
            if count == 0:
                if self._hash_of[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._evictable[block_id] = None

    def _evict(self, num_blocks: int) -> None:
        for _ in range(num_blocks):
            block_id, _ = self._evictable.popitem(last=False)
            spill = self._as_spill(block_id)
            del self._block_of[spill.block_hash]
            self._hash_of[block_id] = None
            self._evicted.append(spill)
            self._free.append(block_id)

    def _as_spill(self, block_id: int) -> BlockSpill:
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        return BlockSpill(block_id, block_hash, self._tenant_of[block_id])

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Compare the books with every block table in use. Raises IntegrityError naming the first
        block or sum that disagrees."""
        appearances = Counter(block_id for table in block_tables for block_id in table)
        for block_id, count in enumerate(self._ref_counts):
            _require(
                count == appearances[block_id],
                f"block {block_id} counts {count} references, tables hold {appearances[block_id]}",
            )
        self._check_places()
        self._check_prefix_map()

    def _check_places(self) -> None:
        free = set(self._free)
        num_referenced = sum(count > 0 for count in self._ref_counts)
        _require(len(free) == len(self._free), "a block is twice on the free list")
        _require(
            len(free) + len(self._evictable) + num_referenced == self.num_blocks,
            f"free {len(free)} + evictable {len(self._evictable)} + referenced {num_referenced} "
            f"blocks are not the pool's {self.num_blocks}",
        )
        for block_id in free:
            _require(self._ref_counts[block_id] == 0, f"free block {block_id} is referenced")
            _require(self._hash_of[block_id] is None, f"free block {block_id} has a hash")
        for block_id in self._evictable:
            _require(self._ref_counts[block_id] == 0, f"evictable block {block_id} is referenced")
            _require(self._hash_of[block_id] is not None, f"evictable block {block_id} has no hash")

    def _check_prefix_map(self) -> None:
        for block_hash, block_id in self._block_of.items():
            _require(
                self._hash_of[block_id] == block_hash,
                f"the prefix map says {block_hash.hex()} is block {block_id}, the block disagrees",
            )
        num_hashed = sum(block_hash is not None for block_hash in self._hash_of)
        _require(
            num_hashed == len(self._block_of),
            f"{num_hashed} blocks have a hash, the prefix map knows {len(self._block_of)}",
        )


def _require(holds: bool, contradiction: str) -> None:
    if not holds:
        raise IntegrityError(contradiction)
