"""The picture of a calibration, as SVG: errors by layer, the limit, and what each layer keeps."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from engine.cache.calibration import BY_BITS, Calibration

WIDTH, HEIGHT = 960, 540
LEFT, RIGHT, TOP, BOTTOM = 84, 824, 92, 468
COLOURS = {"int4": "#d55e00", "k8v4": "#0072b2", "int8": "#009e73"}  # distinct to the colour-blind
INK, FAINT, GRID = "#1f2933", "#616e7c", "#e4e7eb"
LABEL_HEIGHT = 18
MAX_LAYER_TICKS = 16
STEPS = (1, 2, 5)  # of a decade


def plot(calibration: Calibration) -> str:
    """A whole SVG document."""
    picture = _Picture(calibration)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
    )
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    return "\n".join((head, background, *picture.parts(), "</svg>\n"))


class _Picture:
    """Errors lie on a logarithmic axis; one of 0 lies on its lower edge."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        errors = [each for of_layers in calibration.errors.values() for each in of_layers]
        shown = [calibration.max_error, *(each for each in errors if each > 0)]
        self._ticks = _ticks(min(shown), max(shown))

    def parts(self) -> Iterator[str]:
        yield from self._title()
        yield from self._error_axis()
        yield from self._layer_axis()
        yield from self._limit()
        for name in BY_BITS:
            yield from self._line(name)
        yield from self._kept()
        yield from self._labels()

    def _x(self, layer: int) -> float:
        return LEFT + 12 + (RIGHT - LEFT - 24) * layer / max(self._calibration.num_layers - 1, 1)

    def _y(self, error: float) -> float:
        least, greatest = self._ticks[0], self._ticks[-1]
        part = math.log(max(error, least) / least) / math.log(greatest / least)
        return BOTTOM - (BOTTOM - TOP) * part

    def _title(self) -> Iterator[str]:
        found = self._calibration
        windows = len(found.num_tokens)
        yield _text(LEFT, 32, f"{found.model}: what a cold format costs each layer", size=19)
        yield _text(
            LEFT,
            54,
            "relative error of attention behind its output projection, measured on "
            f"{sum(found.num_tokens):,} tokens in {windows} window{'s' * (windows > 1)}",
            colour=FAINT,
        )
        yield f'<circle cx="{LEFT + 6}" cy="70" r="5.5" fill="{FAINT}"/>'
        kept = f"the format that a layer keeps; {found.tiers.cold_format} was wanted"
        yield _text(LEFT + 18, 74, kept, colour=FAINT)

    def _error_axis(self) -> Iterator[str]:
        for tick in self._ticks:
            y = self._y(tick)
            yield _line(LEFT, y, RIGHT, y, GRID)
            yield _text(LEFT - 10, y + 4, _percent(tick), colour=FAINT, anchor="end")

    def _layer_axis(self) -> Iterator[str]:
        num_layers = self._calibration.num_layers
        for layer in range(0, num_layers, -(-num_layers // MAX_LAYER_TICKS)):
            x = self._x(layer)
            yield _line(x, BOTTOM, x, BOTTOM + 5, FAINT)
            yield _text(x, BOTTOM + 21, str(layer), colour=FAINT, anchor="middle")
        yield _line(LEFT, BOTTOM, RIGHT, BOTTOM, FAINT)
        yield _text((LEFT + RIGHT) / 2, BOTTOM + 46, "layer", colour=FAINT, anchor="middle")

    def _limit(self) -> Iterator[str]:
        y = self._y(self._calibration.max_error)
        yield _line(LEFT, y, RIGHT, y, INK, 'stroke-width="1.5" stroke-dasharray="6 4"')

    def _line(self, name: str) -> Iterator[str]:
        errors = self._calibration.errors[name]
        points = " ".join(
            f"{self._x(layer):.1f},{self._y(error):.1f}" for layer, error in enumerate(errors)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>'
        for layer, error in enumerate(errors):
            yield self._dot(name, layer, 2.5, f"layer {layer}, {name}: {_percent(error)}")

    def _kept(self) -> Iterator[str]:
        for layer, name in enumerate(self._calibration.cold_formats):
            error = _percent(self._calibration.errors[name][layer])
            yield self._dot(name, layer, 5.5, f"layer {layer} keeps {name}: {error}")

    def _dot(self, name: str, layer: int, radius: float, title: str) -> str:
        x, y = self._x(layer), self._y(self._calibration.errors[name][layer])
        return (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{COLOURS[name]}" '
            f'stroke="#ffffff"><title>{title}</title></circle>'
        )

    def _labels(self) -> Iterator[str]:
        """At the right ends of the lines, kept apart."""
        found = self._calibration
        limit = f"limit {_percent(found.max_error)}"
        labels = [(self._y(found.max_error), limit, INK)]
        for name in BY_BITS:
            num = found.cold_formats.count(name)
            text = f"{name}: {num} layer{'s' * (num != 1)}"
            labels.append((self._y(found.errors[name][-1]), text, COLOURS[name]))
        labels.sort()
        for y, (_, text, colour) in zip(_apart([y for y, *_ in labels]), labels, strict=True):
            yield _text(RIGHT + 10, y + 4, text, colour=colour)


def _ticks(least: float, greatest: float) -> list[float]:
    """Round numbers from one below `least`, or at it, to one above `greatest`."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(greatest))
    ticks = [step * 10.0**decade for decade in range(first - 1, last + 2) for step in STEPS]
    above = max(index for index, tick in enumerate(ticks) if tick <= least)
    below = min(index for index, tick in enumerate(ticks) if tick > greatest)
    return ticks[above : below + 1]


def _apart(heights: Sequence[float]) -> list[float]:
    """`heights`, ascending, moved so that labels do not overlap."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + LABEL_HEIGHT) if placed else height)
    beyond = max(placed[-1] - BOTTOM, 0)
    return [height - beyond for height in placed]


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" {more}/>'


def _text(
    x: float, y: float, text: str, *, colour: str = INK, anchor: str = "start", size: int = 13
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{colour}">{escape(text)}</text>'
