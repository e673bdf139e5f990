"""Pictures of what settings cost, as SVG: each by its bytes, and along a text."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any

from benchmarks.quality.bars import BOTH, CODE, PROSE
from benchmarks.quality.forced import STRETCH_TOKENS
from benchmarks.svg import (
    FAINT,
    GRID,
    Decades,
    apart,
    document,
    dot,
    line,
    polyline,
    text,
)

WIDTH = 960
LEFT, RIGHT = 330, 920
TOP, ROW_HEIGHT = 96, 34
COLOURS = {"ours": "#d55e00", "ablation": "#e69f00", "peer": "#0072b2"}
KINDS = {"ours": "ours", "ablation": "ours, otherwise", "peer": "a peer's format, emulated"}
LINE_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
ALONG = ("int4", "k8v4", "int8", "vllm_int4", "kivi4", "int4_unrotated")
PLOT_HEIGHT, PLOT_LEFT, PLOT_RIGHT = 520, 84, 720

Settings = Mapping[str, Any]  # as the results file has them


def by_bytes(settings: Settings) -> str:
    """A row for each format, those with the fewest bytes on top; a dot a text, with its
    interval."""
    names = sorted(
        (name for name in settings if settings[name]["kind"] in KINDS),
        key=lambda name: (settings[name]["bytes"], name),
    )
    height = TOP + ROW_HEIGHT * len(names) + 60
    return document(WIDTH, height, _rows(settings, names))


def _rows(settings: Settings, names: Items[str]) -> Iterator[str]:
    bottom = TOP + ROW_HEIGHT * len(names)
    shown = [value for name in names for of_text in BOTH for value in settings[name][of_text]["kl"]]
    axis = Decades.around(shown, LEFT, RIGHT)
    yield text(24, 32, "What a cache costs in answers, by what a cold token takes", size=19)
    yield text(24, 54, "filled: prose; hollow: code; lines: intervals of 95 %", colour=FAINT)
    for index, (kind, said) in enumerate(KINDS.items()):
        yield dot(30 + 190 * index, 74, COLOURS[kind], said)
        yield text(42 + 190 * index, 78, said, colour=FAINT)
    for tick in axis.ticks:
        yield line(axis.place(tick), TOP, axis.place(tick), bottom, GRID)
        yield text(axis.place(tick), bottom + 20, f"{tick:g}", colour=FAINT, anchor="middle")
    middle = (LEFT + RIGHT) / 2
    yield text(middle, bottom + 44, "KL, nats a token", colour=FAINT, anchor="middle")
    for index, name in enumerate(names):
        yield from _row(settings[name], TOP + ROW_HEIGHT * (index + 0.5), axis)


def _row(setting: Mapping[str, Any], y: float, axis: Decades) -> Iterator[str]:
    colour = COLOURS[setting["kind"]]
    yield text(24, y + 4, setting["title"], colour=colour)
    yield text(LEFT - 16, y + 4, f"{setting['bytes']:g} B", colour=FAINT, anchor="end")
    for of_text, shift in ((PROSE, -5), (CODE, 5)):
        mean, low, high = setting[of_text]["kl"]
        yield line(axis.place(low), y + shift, axis.place(high), y + shift, colour, 2)
        title = f"{setting['title']}, {of_text}: {mean:.2e} ({low:.2e} to {high:.2e})"
        yield dot(axis.place(mean), y + shift, colour, title, is_filled=of_text == PROSE)


def along(settings: Settings, scored_from: int) -> str:
    """KL by position, the mean of the texts."""
    shown = {name: _means(settings[name]) for name in ALONG if name in settings}
    return document(WIDTH, PLOT_HEIGHT, _lines(settings, shown, scored_from))


def _lines(
    settings: Settings, shown: Mapping[str, Items[float]], scored_from: int
) -> Iterator[str]:
    bottom = PLOT_HEIGHT - 60
    axis = Decades.around([each for line in shown.values() for each in line], bottom, TOP)
    num_stretches = max(map(len, shown.values()), default=1)
    step = (PLOT_RIGHT - PLOT_LEFT) / num_stretches
    yield text(PLOT_LEFT, 32, "What a cache costs along a text", size=19)
    yield text(PLOT_LEFT, 54, "KL, nats a token; mean of prose and code", colour=FAINT)
    for tick in axis.ticks:
        yield line(PLOT_LEFT, axis.place(tick), PLOT_RIGHT, axis.place(tick), GRID)
        yield text(PLOT_LEFT - 10, axis.place(tick) + 4, f"{tick:g}", colour=FAINT, anchor="end")
    for index in range(0, num_stretches + 1, 2):
        position = f"{scored_from + index * STRETCH_TOKENS:,}"
        yield text(PLOT_LEFT + step * index, bottom + 20, position, colour=FAINT, anchor="middle")
    middle = (PLOT_LEFT + PLOT_RIGHT) / 2
    yield text(middle, bottom + 44, "position", colour=FAINT, anchor="middle")
    labels = []
    for (name, means), colour in zip(shown.items(), LINE_COLOURS, strict=False):
        points = [(PLOT_LEFT + step * (at + 0.5), axis.place(kl)) for at, kl in enumerate(means)]
        yield polyline(points, colour, settings[name]["title"])
        labels.append((points[-1][1], settings[name]["title"], colour))
    labels.sort()
    for y, (_, title, colour) in zip(apart(y for y, *_ in labels), labels, strict=True):
        yield text(PLOT_RIGHT + 10, y + 4, title, colour=colour)


def _means(setting: Mapping[str, Any]) -> list[float]:
    texts = [setting[of_text]["kl_by_position"] for of_text in BOTH]
    return [sum(each) / len(each) for each in zip(*texts, strict=True)]
