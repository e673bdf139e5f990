"""The cases of the engine on a GPU: what is measured, what it is held to, and the floor that the
bytes set."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.engine.cases import Case, DecodeCase, FirstTokenCase, PrefillCase
from benchmarks.engine.job import Outcome
from benchmarks.engine.shapes import LLAMA_8B, SMOLLM2_135M, Shape
from benchmarks.results import Row

START = "start_ready_s"
MIN_RATIO = 1.0
MIN_ATTENTION_RATIO = 0.9
# Bars on our own value, besides the ratio.
BARS = {"tpot_b1_1k": 4.5, "step_b32_8k": 12.8, "smollm2_tpot_1k": 1.2}
MAX_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Measure:
    """A case in the table: on which shape, in which unit."""

    shape: Shape
    case: Case
    metric: str
    unit: str = "ms"
    better: Literal["lower", "higher"] = "lower"

    @property
    def num_bytes(self) -> int | None:
        """What one decode step reads; None where bytes are not what bounds it."""
        if not isinstance(self.case, DecodeCase):
            return None
        context = self.case.context + self.case.num_steps // 2
        kv = self.case.batch * context * self.shape.kv_token_bytes
        return self.shape.read_weight_bytes + kv


def _decode(name: str, batch: int, context: int, shape: Shape = LLAMA_8B) -> Measure:
    return Measure(shape, DecodeCase(name, batch, context), "time of a decode step")


def _first_token(name: str, context: int) -> Measure:
    return Measure(LLAMA_8B, FirstTokenCase(name, context), "time to first token, fresh prompt")


# In this order: the prompts of the prefill are the cached ones of the decodes after it.
MEASURES = (
    Measure(
        LLAMA_8B,
        PrefillCase("prefill_tok_s", 8192, group=8, num_groups=4),
        "prefill of 8 prompts of 8,192 tokens at a time",
        "tok/s",
        "higher",
    ),
    _decode("step_b32_8k", 32, 8192),
    _decode("step_b8_8k", 8, 8192),
    _decode("tpot_b1_8k", 1, 8192),
    _decode("tpot_b1_1k", 1, 1024),
    _first_token("ttft_8k", 8192),
    _first_token("ttft_32k", 32768),
    _decode("tpot_b1_32k", 1, 32768),
    _decode("tpot_b1_128k", 1, 131072),
    _decode("smollm2_tpot_1k", 1, 1024, SMOLLM2_135M),
)


def engine_rows(measure: Measure, ours: Outcome, peer: Outcome | None) -> Iterator[Row]:
    """Medians; nothing when ours has no samples."""
    name = measure.case.name
    if not ours.samples.get(name):
        return
    value = statistics.median(ours.samples[name])
    theirs = peer.samples.get(name) if peer else None
    yield Row(
        name,
        measure.metric,
        measure.unit,
        measure.better,
        value,
        peer.engine if peer else None,
        statistics.median(theirs) if theirs else None,
        MIN_RATIO,
        "ratio",
    )
    if name in BARS:
        metric = f"{measure.metric}, alone"
        yield Row(name, metric, measure.unit, measure.better, value, floor=BARS[name])


def start_rows(ours: Outcome, again: Outcome | None, peer: Outcome | None) -> Iterator[Row]:
    """Each engine's first start on this host, then ours `again`, what it compiled still there."""
    metric = "process start to first token"
    yield Row(
        START,
        f"{metric}, first on this host",
        "s",
        "lower",
        ours.ready_s,
        peer.engine if peer else None,
        peer.ready_s if peer else None,
        MIN_RATIO,
        "ratio",
    )
    if again is not None:
        yield Row(
            START, f"{metric}, warm compile cache", "s", "lower", again.ready_s, floor=MAX_START_S
        )


def roofline_row(measure: Measure, row: Row, copy_bytes_per_us: float) -> Iterator[Row]:
    """The share of the time that reading the bytes at the copy rate would take."""
    if measure.num_bytes is None:
        return
    floor_ms = measure.num_bytes / copy_bytes_per_us / 1e3
    theirs = None if row.peer_value is None else floor_ms / row.peer_value
    metric = f"share of the roofline, {measure.num_bytes / 1e9:.2f} GB at the copy rate"
    yield Row(row.case, metric, "1", "higher", floor_ms / row.ours, row.peer, theirs)


def attention_rows(measured: Mapping[str, Mapping[str, float]]) -> Iterator[Row]:
    for name, times in measured.items():
        yield Row(
            name,
            "decode attention of one layer",
            "us",
            "lower",
            times["ours_us"],
            "FlashAttention 3",
            times["peer_us"],
            MIN_ATTENTION_RATIO,
            "ratio",
        )
