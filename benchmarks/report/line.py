"""One line of the page: a measured value, whoever stands beside it, and the bars that it has."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.results import Row

MAX_DIGITS = 12
UNITLESS = ("1", "count", "share")
WORDS = {
    "smollm2": "SmolLM2 135M",
    "open": "Poisson arrivals",
    "messages": "messages",
    "mixed": "tiers and lengths mixed",
}
CASE_PARTS = re.compile(
    r"(?:^|_)(b\d+_\d+[km]|b\d+|c\d+|p\d+|\d+rps|\d+kb|\d+[km]|int4|int8|k8v4|"
    + "|".join(WORDS)
    + r")(?=_|$)"
)


@dataclass(frozen=True, slots=True)
class Line:
    """Rows of one value: beside several peers, or with a bar on the value and one on the ratio."""

    rows: tuple[Row, ...]

    @property
    def case(self) -> str:
        return self.rows[0].case

    @property
    def ours(self) -> str:
        bar = next((row.floor for row in self.rows if row.floor_of == "value"), None)
        return amount(self.rows[0].ours, self.rows[0].unit, bar)

    @property
    def beside(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.peer_value is not None)

    @property
    def held(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.floor is not None)

    @property
    def is_missed(self) -> bool:
        return any(row.meets_floor is False for row in self.rows)

    @property
    def what(self) -> str:
        """In words."""
        metric = self.rows[0].metric
        if " " in self.case:
            is_a_name = "_" in metric or metric == self.rows[0].unit
            return self.case if is_a_name else f"{self.case}: {metric}"
        return ", ".join((metric, *qualifiers(self.case, metric)))

    @property
    def named(self) -> str:
        """In words, and as the file and `--only` call it."""
        return self.what if " " in self.case else f"{self.what} `{self.case}`"


def lines_of(rows: Iterable[Row]) -> list[Line]:
    """In the order of their first rows."""
    of_value: dict[tuple[str, str, str, float], list[Row]] = {}
    for row in rows:
        metric = row.metric.partition(", ")[0]
        key = (row.case.removesuffix("_vs_exact"), metric, row.unit, row.ours)
        of_value.setdefault(key, []).append(row)
    return [Line(tuple(each)) for each in of_value.values()]


def qualifiers(case: str, metric: str) -> Iterator[str]:
    """What the name of a case says and its metric does not: `tpot_b1_8k` is of 1 x 8K."""
    for part in CASE_PARTS.findall(re.split("_vs_|_during_", case)[0]):
        said = _in_words(part)
        is_percentile = re.fullmatch(r"p\d+", part) is not None
        is_said = is_percentile and re.search("percentile|median", metric) is not None
        if not is_said and said.lower() not in metric.lower():
            yield said


def _in_words(part: str) -> str:
    if part in WORDS:
        return WORDS[part]
    if batch := re.fullmatch(r"b(\d+)_(\d+[km])", part):
        return f"{batch[1]} x {batch[2].upper()}"
    if part.startswith("b"):
        return f"batch of {part[1:]}"
    if part.startswith("c"):
        return f"{part[1:]} at once"
    if part.endswith("rps"):
        return f"{part[:-3]} req/s"
    if part.endswith("kb"):
        return f"{part[:-2]} KB"
    return part.upper() if re.fullmatch(r"\d+[km]", part) else part


def amount(value: float | None, unit: str, bar: float | None = None) -> str:
    """With its unit, in as many digits as show on which side of its bar it is."""
    if value is None:
        return ""
    return with_unit(number(value, bar), unit)


def with_unit(shown: str, unit: str) -> str:
    return shown if unit in UNITLESS else f"{shown} {unit}"


def ratio(row: Row) -> str:
    """Such as `1.04x`."""
    if row.ratio is None:
        return ""
    bar = row.floor if row.floor_of == "ratio" else None
    return f"{number(row.ratio, bar, 3)}x"


def bar(row: Row) -> str:
    """Such as `at most 12.8 ms`."""
    if row.floor is None:
        return ""
    floor = f"{row.floor:,.0f}" if float(row.floor).is_integer() else f"{row.floor:.3g}"
    if row.floor_of == "ratio":
        return f"at least {floor}x"
    side = "at least" if row.better == "higher" else "at most"
    return with_unit(f"{side} {floor}", row.unit)


def number(value: float, bar: float | None = None, digits: int = 4) -> str:
    """So many digits, and more where a bar is nearer than they show."""
    for more in range(digits, MAX_DIGITS):
        shown = _number(value, more)
        if bar is None or _side(float(shown.replace(",", "")), bar) == _side(value, bar):
            return shown
    return repr(value)


def _side(value: float, bar: float) -> int:
    return (value > bar) - (value < bar)


def _number(value: float, digits: int) -> str:
    if value == round(value) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}"
