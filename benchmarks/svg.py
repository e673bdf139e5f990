"""The few shapes that our pictures are made of, and an axis of decades."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Self

INK, FAINT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
LABEL_HEIGHT = 17


def document(width: int, height: int, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
    )
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join((head, background, *parts, "</svg>\n"))


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width:g}"/>'


def text(
    x: float, y: float, said: str, *, colour: str = INK, anchor: str = "start", size: int = 13
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{colour}">{escape(said)}</text>'


def dot(x: float, y: float, colour: str, title: str, *, is_filled: bool = True) -> str:
    fill = colour if is_filled else "#ffffff"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{colour}" '
        f'stroke-width="2"><title>{escape(title)}</title></circle>'
    )


def polyline(points: Iterable[tuple[float, float]], colour: str, title: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2">'
        f"<title>{escape(title)}</title></polyline>"
    )


@dataclass(frozen=True, slots=True)
class Decades:
    """A logarithmic axis from 10**first at `start` to 10**last at `end`. What lies below it, as
    zero does, lies on its edge."""

    first: int
    last: int
    start: float
    end: float

    @classmethod
    def around(cls, values: Iterable[float], start: float, end: float) -> Self:
        logs = [math.log10(value) for value in values if value > 0] or [0.0]
        first = math.floor(min(logs))
        return cls(first, max(math.ceil(max(logs)), first + 1), start, end)

    def place(self, value: float) -> float:
        log = math.log10(value) if value > 0 else self.first
        part = (max(log, self.first) - self.first) / (self.last - self.first)
        return self.start + (self.end - self.start) * part

    @property
    def ticks(self) -> list[float]:
        return [10.0**exponent for exponent in range(self.first, self.last + 1)]


def apart(heights: Iterable[float]) -> list[float]:
    """`heights`, ascending, moved down so that labels do not overlap."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + LABEL_HEIGHT) if placed else height)
    return placed
