"""What a block costs to allocate and to free, in batches, on one core."""

import statistics
import time
from dataclasses import dataclass

from engine.cache.block_address import SequenceAddresses
from engine.cache.epochs import Epochs
from engine.cache.formats import Format
from engine.cache.guarded_queue import Ids
from engine.cache.kv_arenas import KvArenas
from engine.cache.slab_arena import SlabArena
from engine.cache.tier_config import TierConfig
from engine.cache.tiered_table import TieredTable

NUM_REPEATS = 300
NUM_CACHED_REPEATS = 40  # each of which writes as many addresses
NUM_WARM_UPS = 5  # more batches than the arenas hold


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Nanoseconds for the keys and the values of one block. The least of many repeats is what the
    code takes; the median is what this machine, with whatever else it does, let it have."""

    least_ns: float
    median_ns: float


def allocate_and_free(batch: int, block_format: Format) -> tuple[BlockTime, BlockTime]:
    """Blocks without an address, out of free slabs and back into the queue of freed ones; a step
    begins and finishes with every batch."""
    epochs, arenas = _arenas(4 * batch * block_format.num_slabs)
    allocated, freed = [], []
    for _ in range(NUM_REPEATS):
        epoch = epochs.begin()
        blocks, allocated_ns = _allocate(arenas, batch, block_format)
        allocated.append(allocated_ns)
        freed.append(_release(arenas, blocks))
        epochs.finish(epoch)
    return _per_block(allocated, batch), _per_block(freed, batch)


def evict_and_cache(batch: int, block_format: Format) -> tuple[BlockTime, BlockTime]:
    """The same in arenas that are full of cached blocks: every allocation evicts, and what is freed
    has an address and is cached."""
    epochs, arenas = _arenas(4 * batch * block_format.num_slabs)
    allocated, freed = [], []
    for repeat in range(NUM_WARM_UPS + NUM_CACHED_REPEATS):
        epoch = epochs.begin()
        blocks, allocated_ns = _allocate(arenas, batch, block_format)
        for arena, of_arena in zip(arenas, blocks, strict=True):
            for block in of_arena.tolist():
                arena.register(block, b"%d %d" % (repeat, block))
        freed_ns = _release(arenas, blocks)
        epochs.finish(epoch)
        if repeat >= NUM_WARM_UPS:
            allocated.append(allocated_ns)
            freed.append(freed_ns)
    return _per_block(allocated, batch), _per_block(freed, batch)


def decode_step_us(config: TierConfig, num_tokens: int) -> float:
    """Of the table of one sequence of `num_tokens` tokens: the mean over whole blocks of steps,
    ageing and all; the least of some repeats."""
    arenas = KvArenas.create(num_tokens // 8, num_tokens // 8, config)
    addresses = SequenceAddresses(b"", [bytes(16)] * num_tokens, b"", config.block_size)
    table = TieredTable(arenas, config, addresses)
    epoch = arenas.epochs.begin()
    while table.num_tokens < num_tokens:
        table.extend_prefill(num_tokens - table.num_tokens)
    arenas.epochs.finish(epoch)
    times_ns = []
    for _ in range(NUM_CACHED_REPEATS):
        started_ns = time.perf_counter_ns()
        for _ in range(config.block_size):
            epoch = arenas.epochs.begin()
            table.extend_decode()
            arenas.epochs.finish(epoch)
        times_ns.append(time.perf_counter_ns() - started_ns)
    return min(times_ns) / config.block_size / 1e3


def _arenas(num_slabs: int) -> tuple[Epochs, list[SlabArena]]:
    epochs = Epochs()
    return epochs, [SlabArena(num_slabs, epochs) for _ in range(2)]


def _allocate(arenas: list[SlabArena], batch: int, block_format: Format) -> tuple[list[Ids], float]:
    started_ns = time.perf_counter_ns()
    blocks = [arena.allocate(batch, block_format) for arena in arenas]
    return blocks, time.perf_counter_ns() - started_ns


def _release(arenas: list[SlabArena], blocks: list[Ids]) -> float:
    started_ns = time.perf_counter_ns()
    for arena, of_arena in zip(arenas, blocks, strict=True):
        arena.release(of_arena)
    return time.perf_counter_ns() - started_ns


def _per_block(times_ns: list[float], batch: int) -> BlockTime:
    return BlockTime(min(times_ns) / batch, statistics.median(times_ns) / batch)
