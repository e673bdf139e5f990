"""A picture of horizontal bars in panels, each with an axis of its own."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol, Self

from benchmarks.svg import FAINT, GRID, INK, Decades, document, line, text

WIDTH, TOP, ROW_HEIGHT, BAR_HEIGHT = 960, 88, 21, 13
LEFT, RIGHT = 300, 640
HEAD_HEIGHT, GROUP_GAP, FOOT_HEIGHT = 42, 9, 52
MAX_EVEN = 10.0  # larger values lie on an axis of decades
NUM_TICKS = 5


class Axis(Protocol):
    def place(self, value: float) -> float: ...

    @property
    def ticks(self) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class Even:
    """From `first` to `last` times `step`."""

    first: int
    last: int
    step: float

    @classmethod
    def around(cls, values: Sequence[float]) -> Self:
        least, greatest = min(values), max(values)
        wanted = (greatest - least) / NUM_TICKS or 1.0
        decade = 10.0 ** math.floor(math.log10(wanted))
        step = next(each * decade for each in (1, 2, 5, 10) if each * decade >= wanted)
        first = math.floor(least / step)
        return cls(first, max(math.ceil(greatest / step), first + 1), step)

    def place(self, value: float) -> float:
        part = (value / self.step - self.first) / (self.last - self.first)
        return LEFT + (RIGHT - LEFT) * part

    @property
    def ticks(self) -> list[float]:
        return [self.step * each for each in range(self.first, self.last + 1)]


@dataclass(frozen=True, slots=True)
class Bar:
    """`said` stands at its right."""

    label: str
    value: float
    said: str
    colour: str
    is_hollow: bool = False
    said_colour: str = INK


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars begin at `origin`; those of a group stand together; `note` stands below the title."""

    title: str
    note: str
    unit: str
    origin: float
    groups: Sequence[Sequence[Bar]]

    @property
    def height(self) -> float:
        return HEAD_HEIGHT + self._bars_height + FOOT_HEIGHT

    @property
    def _bars_height(self) -> float:
        num_bars = sum(map(len, self.groups))
        return ROW_HEIGHT * num_bars + GROUP_GAP * (len(self.groups) - 1)

    @property
    def axis(self) -> Axis:
        values = [self.origin, *(bar.value for group in self.groups for bar in group)]
        if self.origin > 0 and max(values) > MAX_EVEN:
            return Decades.around(values, LEFT, RIGHT)
        return Even.around(values)

    def parts(self, top: float) -> Iterator[str]:
        axis = self.axis
        yield text(24, top + 12, self.title, size=15)
        yield text(24, top + 30, self.note, colour=FAINT)
        top += HEAD_HEIGHT
        bottom = top + self._bars_height
        for tick in axis.ticks:
            yield line(axis.place(tick), top, axis.place(tick), bottom, GRID)
            said = f"{tick / 1e6:g}M" if tick >= 1e6 else f"{tick:,.4g}"
            yield text(axis.place(tick), bottom + 17, said, colour=FAINT, anchor="middle")
        yield text(RIGHT + 34, bottom + 17, self.unit, colour=FAINT)
        for group in self.groups:
            for bar in group:
                yield from self._bar(bar, top + ROW_HEIGHT / 2, axis)
                top += ROW_HEIGHT
            top += GROUP_GAP
        origin = axis.place(self.origin)
        yield line(origin, bottom, origin, bottom - self._bars_height, INK, 1.5)

    def _bar(self, bar: Bar, middle: float, axis: Axis) -> Iterator[str]:
        yield text(24, middle + 4, bar.label)
        left, right = sorted((axis.place(self.origin), axis.place(bar.value)))
        fill = "#ffffff" if bar.is_hollow else bar.colour
        yield (
            f'<rect x="{left:.1f}" y="{middle - BAR_HEIGHT / 2:.1f}" width="{right - left:.1f}" '
            f'height="{BAR_HEIGHT}" fill="{fill}" stroke="{bar.colour}" stroke-width="1.5">'
            f"<title>{escape(f'{bar.label}: {bar.said}')}</title></rect>"
        )
        yield text(RIGHT + 34, middle + 4, bar.said, colour=bar.said_colour)


def picture(title: str, told: str, panels: Sequence[Panel]) -> str:
    """A whole SVG document."""
    height = TOP + sum(panel.height for panel in panels)
    return document(WIDTH, round(height), _parts(title, told, panels))


def _parts(title: str, told: str, panels: Sequence[Panel]) -> Iterator[str]:
    yield text(24, 34, title, size=19)
    yield text(24, 56, told, colour=FAINT)
    top: float = TOP
    for panel in panels:
        yield from panel.parts(top)
        top += panel.height
