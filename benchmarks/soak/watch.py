"""How long steps take beside others of their kind, and whether memory grows."""

import ctypes
import os
import statistics
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.outputs import StepStats

MIN_STEPS = 20  # of a kind, for its median to mean anything
NUM_WINDOWS = 8

Probe = Callable[[], dict[str, float]]


def kind_of(stats: StepStats) -> str | None:
    """By what is computed; None of nothing."""
    if stats.num_prefill_tokens:
        return f"prefill {1 << (stats.num_prefill_tokens - 1).bit_length()}"
    return "decode" if stats.num_decode_tokens else None


@dataclass(frozen=True, slots=True)
class Slowest:
    kind: str
    num_steps: int
    median_ms: float
    worst_ms: float

    @property
    def ratio(self) -> float:
        return self.worst_ms / self.median_ms


class StepTimes:
    """`lag`: how many steps older than what a step plans is what it waits for. Keeps eight bytes
    a step."""

    def __init__(self, lag: int) -> None:
        self._planned: deque[str | None] = deque([None] * lag)
        self._times: dict[str, array[float]] = {}

    def note(self, stats: StepStats, step_ms: float, *, counts: bool = True) -> None:
        """Not `counts`: remember what was planned, forget the time."""
        self._planned.append(kind_of(stats))
        kind = self._planned.popleft()
        if kind is not None and counts:
            self._times.setdefault(kind, array("d")).append(step_ms)

    @property
    def kinds(self) -> list[Slowest]:
        """Those with enough steps, the one with the worst outlier first."""
        found = [
            Slowest(kind, len(times), statistics.median(times), max(times))
            for kind, times in self._times.items()
            if len(times) >= MIN_STEPS
        ]
        return sorted(found, key=lambda each: -each.ratio)


class MemoryWatch:
    """`probe` says bytes by name; two numbers are kept of each look."""

    def __init__(self, probe: Probe, from_s: float, to_s: float) -> None:
        self._probe = probe
        self._from_s = from_s
        self._to_s = to_s
        self._windows: dict[str, list[array[float]]] = {}
        self.last: dict[str, float] = {}

    def look(self, now_s: float) -> None:
        self.last = self._probe()
        if not self._from_s <= now_s < self._to_s:
            return
        share = (now_s - self._from_s) / (self._to_s - self._from_s)
        for name, num_bytes in self.last.items():
            windows = self._windows.setdefault(name, [array("d") for _ in range(NUM_WINDOWS)])
            windows[int(share * NUM_WINDOWS)].append(num_bytes)

    def growth_percent(self) -> dict[str, float]:
        """The largest median of an eighth of the time over that of the first."""
        grown = {}
        for name, windows in self._windows.items():
            medians = [statistics.median(window) for window in windows if window]
            grown[name] = 100 * (max(medians) / medians[0] - 1)
        return grown


def probe_of(device: str) -> Probe:
    return resident_bytes if device == "cpu" else lambda: cuda_bytes(device) | resident_bytes()


def cuda_bytes(device: str) -> dict[str, float]:
    return {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
    }


def resident_bytes() -> dict[str, float]:
    """What nobody has is given back first. How much of it the allocator would keep depends on what
    lies behind it, and moved by 27 MB of 1.1 GB with the sequences of a soak that leaks nothing."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of the GNU C library
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"rss": pages * os.sysconf("SC_PAGE_SIZE")}
