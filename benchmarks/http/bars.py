"""The cases over HTTP, and what they are held to."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.http.rounds import MAX_TPOT_MS, MAX_TTFT_MS, Round
from benchmarks.results import Row

CONCURRENCIES = (1, 32, 128)
MIN_RATIO = 1.0
BARS = ("goodput_c1", "goodput_c32", "goodput_c128", "itl_p99_c32", "ttft_p50_c1")
Rounds = Mapping[int, Sequence[Round]]  # by concurrency


@dataclass(frozen=True, slots=True)
class Measure:
    """`field` of a Round; `name` in cases."""

    name: str
    field: str
    metric: str
    unit: str
    better: Literal["lower", "higher"]


MEASURES = (
    Measure(
        "goodput",
        "goodput",
        f"output tokens of requests within {MAX_TTFT_MS:.0f} ms TTFT and {MAX_TPOT_MS:.0f} ms TPOT",
        "tok/s",
        "higher",
    ),
    Measure("tok_s", "tok_s", "output tokens", "tok/s", "higher"),
    Measure("ttft_p50", "ttft_p50_ms", "time to first text, median", "ms", "lower"),
    Measure("ttft_p99", "ttft_p99_ms", "time to first text, 99th percentile", "ms", "lower"),
    Measure("itl_p50", "itl_p50_ms", "gap between texts, median", "ms", "lower"),
    Measure("itl_p99", "itl_p99_ms", "gap between texts, 99th percentile", "ms", "lower"),
)


def rows_of(ours: Rounds, peer: str | None, theirs: Rounds) -> Iterator[Row]:
    """Medians of the rounds."""
    for concurrency, rounds in ours.items():
        for measure in MEASURES:
            case = f"{measure.name}_c{concurrency}"
            peer_rounds = theirs.get(concurrency, ())
            yield Row(
                f"http_{case}",
                measure.metric,
                measure.unit,
                measure.better,
                _median(measure, rounds),
                peer,
                _median(measure, peer_rounds) if peer_rounds else None,
                MIN_RATIO if case in BARS else None,
                "ratio",
            )
        num_failed = sum(each.num_failed for each in rounds)
        share = num_failed / sum(each.num_requests for each in rounds)
        yield Row(f"http_failed_c{concurrency}", "failed requests", "1", "lower", share, floor=0.0)


def _median(measure: Measure, rounds: Sequence[Round]) -> float:
    return statistics.median(getattr(each, measure.field) for each in rounds)
