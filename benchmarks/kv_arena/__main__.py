"""`python -m benchmarks.kv_arena`: results/kv-arena-cpu.json, in about five minutes on a quiet
machine. Needs no GPU."""

import sys
import time

from benchmarks.command import Progress, run_benchmark
from benchmarks.kv_arena.capacity import num_tokens_held
from benchmarks.kv_arena.random_walk import RandomWalk, small_tiers
from benchmarks.kv_arena.speed import BlockTime, allocate_and_free, decode_step_us, evict_and_cache
from benchmarks.results import Row
from engine.cache.formats import COLD_FORMATS, Format
from engine.cache.tier_config import TierConfig

GATE = (
    "tests/unit/engine/test_block_address.py",
    "tests/unit/engine/test_kv_arenas.py",
    "tests/unit/engine/test_slab_arena.py",
    "tests/unit/engine/test_tier_config.py",
    "tests/unit/engine/test_tiered_table.py",
    "tests/property/test_arena_random_walk.py",
    "tests/property/test_slab_arena_machine.py",
)
PACKAGES = ("numpy",)
BATCHES = (256, 1024, 4096)
MAX_BLOCK_NS = 100
NUM_OPERATIONS = 1_000_000
SEED = 2_026
LONG, SHORT = 65_536, 8_192
LEAST_CAPACITY = {"k8v4": 2.4, "int4": 3.4, "int8": 1.8}


def measure(progress: Progress) -> list[Row]:
    return _speed(progress) + _capacity(progress) + _walk(progress)


def _speed(progress: Progress) -> list[Row]:
    rows = []
    for batch in BATCHES:
        progress(f"batches of {batch}")
        free = [allocate_and_free(batch, block_format) for block_format in Format]
        full = [evict_and_cache(batch, block_format) for block_format in Format]
        rows += [
            *_times(f"allocate {batch} blocks", [each[0] for each in free], MAX_BLOCK_NS),
            *_times(f"free {batch} blocks", [each[1] for each in free], MAX_BLOCK_NS),
            *_times(f"evict for {batch} blocks", [each[0] for each in full], None),
            *_times(f"cache {batch} freed blocks", [each[1] for each in full], None),
        ]
    for name in COLD_FORMATS:
        step_us = decode_step_us(TierConfig(cold_format=name), LONG)
        rows.append(Row(f"decode step at 64K, {name}, least", "step_us", "us", "lower", step_us))
    return rows


def _times(case: str, of_formats: list[BlockTime], floor: float | None) -> list[Row]:
    """Of the slowest format."""
    least_ns = max(each.least_ns for each in of_formats)
    median_ns = max(each.median_ns for each in of_formats)
    return [
        Row(f"{case}, least", "block_ns", "ns", "lower", least_ns, floor=floor),
        Row(f"{case}, median", "block_ns", "ns", "lower", median_ns),
    ]


def _capacity(progress: Progress) -> list[Row]:
    rows = []
    for num_tokens in (LONG, SHORT):
        progress(f"pools of sequences of {num_tokens} tokens")
        in_bf16 = num_tokens_held(TierConfig(exact=True), num_tokens, shared_out_for=LONG)
        for name in COLD_FORMATS:
            config = TierConfig(cold_format=name)
            held = num_tokens_held(config, num_tokens, shared_out_for=LONG)
            floor = LEAST_CAPACITY[name] if num_tokens == LONG else None
            rows.append(
                Row(f"{name}, sequences of {num_tokens >> 10}K", "num_tokens", "tokens", "higher",
                    held, "bf16", in_bf16, floor, "ratio")
            )  # fmt: skip
    return rows


def _walk(progress: Progress) -> list[Row]:
    """A violation ends the run with a traceback: there are rows only where there was none."""
    walks, started_s = [], time.process_time()
    for name in COLD_FORMATS:
        walks.append(RandomWalk(small_tiers(name), SEED))
        progress(f"random walk, {name}")
        walks[-1].run(-(-NUM_OPERATIONS // len(COLD_FORMATS)))
        walks[-1].audit()
    seconds = time.process_time() - started_s
    num_operations = sum(walk.counts["operations"] for walk in walks)
    memories = [walk.pool.memory for walk in walks]
    seen = {
        "violations": 0,
        "audits of all books": sum(walk.counts["audits"] for walk in walks),
        "slabs given while none could read": sum(m.num_slabs_written for m in memories),
        "table entries read back": sum(m.num_entries_checked for m in memories),
        "addresses with one content": sum(len(m.content_of_address) for m in memories),
        "blocks demoted by a copy": sum(m.num_blocks_copied for m in memories),
        "blocks shared by a prefix": sum(walk.counts["shared blocks"] for walk in walks),
        "arena exhausted": sum(walk.counts["exhausted"] for walk in walks),
        "taken up again": sum(walk.counts["taken up again"] for walk in walks),
    }
    return [
        Row("walk: operations", "num_operations", "count", "higher", num_operations,
            floor=NUM_OPERATIONS),
        Row("walk: an operation and its checks", "operation_us", "us", "lower",
            1e6 * seconds / num_operations),
        *(Row(f"walk: {what}", "count", "count", "lower" if what == "violations" else "higher",
              count, floor=0 if what == "violations" else None) for what, count in seen.items()),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_benchmark("kv-arena-cpu", GATE, measure, PACKAGES, "benchmarks.kv_arena"))
