"""The arenas' benchmark from end to end, on next to nothing."""

from benchmarks.kv_arena import __main__ as benchmark
from benchmarks.kv_arena import capacity, speed


def test_every_bar_is_there_and_nothing_went_wrong(monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "BATCHES", (16,))
    monkeypatch.setattr(benchmark, "NUM_OPERATIONS", 900)
    monkeypatch.setattr(speed, "NUM_REPEATS", 3)
    monkeypatch.setattr(speed, "NUM_CACHED_REPEATS", 3)
    monkeypatch.setattr(capacity, "NUM_SEQUENCES", 3)
    rows = {row.case: row for row in benchmark.measure(lambda message: None)}
    assert {case for case, row in rows.items() if row.floor is not None} == {
        "allocate 16 blocks, least",
        "free 16 blocks, least",
        "k8v4, sequences of 64K",
        "int4, sequences of 64K",
        "int8, sequences of 64K",
        "walk: operations",
        "walk: violations",
    }
    assert rows["walk: operations"].ours == 900
    assert rows["walk: violations"].meets_floor
    assert all(rows[f"{name}, sequences of 64K"].ratio > 1 for name in ("k8v4", "int4", "int8"))
