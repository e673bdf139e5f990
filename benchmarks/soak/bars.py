"""Rows of a soak, with their bars."""

from collections.abc import Iterator

from benchmarks.results import Row
from benchmarks.soak.soak import WARM_UP_SHARE, Outcome
from benchmarks.soak.watch import StepTimes

MAX_GROWTH_PERCENT = 1.0
MAX_STEP_RATIO = 10.0
AFTER = f"after the first {WARM_UP_SHARE:.0%} of the time"
FAULTS = {
    "integrity": ("integrity_errors", "books of blocks and sequences that disagree after a step"),
    "errors": ("step_errors", "other errors that left the engine"),
    "ends": ("wrong_ends", "requests that did not end exactly once, as they should"),
    "totals": ("wrong_totals", "sums of the engine or counts of a request unlike what was told"),
    "blocks": ("lost_blocks", "idle engines with blocks that are not free"),
}


def rows_of(outcome: Outcome, device: str) -> Iterator[Row]:
    ledger = outcome.ledger
    for kind, (case, metric) in FAULTS.items():
        yield Row(case, metric, "count", "lower", ledger.faults[kind], floor=0)
    bounded = {"rss"} if device == "cpu" else {"allocated", "reserved"}
    for name, percent in outcome.memory.growth_percent().items():
        metric = f"growth of bytes {name}, largest eighth of the time over the first, {AFTER}"
        floor = MAX_GROWTH_PERCENT if name in bounded else None
        yield Row(f"growth_{name}", metric, "%", "lower", percent, floor=floor)
    yield from _slowest("worst_step", "step", outcome.times)
    if device == "cpu":
        yield from _slowest("worst_step_cpu", "CPU time of a step", outcome.cpu_times)
    yield from _what_happened(outcome)


def _slowest(case: str, what: str, times: StepTimes) -> Iterator[Row]:
    if times.kinds:
        slowest = times.kinds[0]
        metric = (
            f"the longest {what} over the median of its kind ({slowest.kind}: {slowest.num_steps} "
            f"steps, median {slowest.median_ms:.1f} ms), {AFTER}"
        )
        yield Row(case, metric, "x", "lower", slowest.ratio, floor=MAX_STEP_RATIO)


def _what_happened(outcome: Outcome) -> Iterator[Row]:
    """A soak in which one of these never happened has not tried it."""
    ledger, totals = outcome.ledger, outcome.totals
    happened = {
        "preemptions": totals.preemptions,
        "cached_tokens": ledger.num_cached,
        "aborts": ledger.ended["abort"],
        "stop_tokens": ledger.ended["stop_token"],
        "requests": ledger.num_begun,
        "rests": ledger.num_rests,
        "steps": outcome.num_steps,
    }
    for case, count in happened.items():
        yield Row(case, f"{case.replace('_', ' ')} in all", "count", "higher", count, floor=1)
    rate = ledger.num_told / outcome.seconds
    yield Row("tok_s", "new tokens, checks after every step included", "tok/s", "higher", rate)
