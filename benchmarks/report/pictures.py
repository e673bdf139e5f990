"""The two pictures of the page: ours beside vLLM, and tiers beside what they replace."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.report.bars import Bar, Panel, picture
from benchmarks.report.line import Line, amount, lines_of, number, qualifiers, ratio
from benchmarks.report.results_file import ResultsFile
from benchmarks.report.sections import SECTIONS
from benchmarks.results import Row
from benchmarks.svg import INK

BESIDE_VLLM, TIERS = "performance-beside-vllm.svg", "performance-tiers.svg"
SHOWS = {
    BESIDE_VLLM: "Flashray beside vLLM in one run: the exact engine, HTTP, interference",
    TIERS: "Tiers beside our exact mode and vLLM: decode steps, tokens that fit",
}
EXACT, TIERED = "engine-exact-h200", "kv-engine-h200"
BESIDE = (EXACT, "http-h200", "interference-h200")
LEFT_OUT = ("http_tok_s",)  # near goodput, and in the table
DECODE_STEP, FIT = "time of a decode step", "tokens_fit_"
BETTER, WORSE = "#0072b2", "#d55e00"  # distinct to the colour-blind, as those of engines are
OF_TIERS, OF_EXACT, OF_PEER, OF_FP8_PEER = "#d55e00", "#e69f00", "#0072b2", "#56b4e9"
SHORT = {
    "time of a decode step": "decode step",
    "time to first token, fresh prompt": "first token of a fresh prompt",
    "prefill of 8 prompts of 8,192 tokens": "prefill, 8 prompts of 8K at a time",
    "process start to first token": "from start to first token",
    "output tokens of requests within": "goodput",
    "time to first text, median": "first text, p50",
    "time to first text, 99th": "first text, p99",
    "gap between texts, median": "gap between texts, p50",
    "gap between texts, 99th": "gap between texts, p99",
    "99th percentile of the gaps of": "gaps of 16 streams, p99",
    "95th percentile of the wait of": "wait of short prompts, p95",
    "median gap of the 16 streams": "gaps of 16 streams before it, p50",
}
MAX_LABEL = 40


def pictures_of(files: Mapping[str, ResultsFile]) -> dict[str, str]:
    """SVG documents by file name; none of what no file has."""
    panels = {BESIDE_VLLM: list(_beside_vllm(files)), TIERS: list(_tiers(files))}
    heads = {
        BESIDE_VLLM: (
            "Flashray beside vLLM, in one run",
            "right of the line ours is better; hollow: a bar was missed; numbers: ours / vLLM's",
        ),
        TIERS: (
            "What tiers of the KV cache give",
            "the Llama 3.1 8B shape, beside our exact mode, vLLM in bf16 and with an fp8 cache",
        ),
    }
    return {name: picture(*heads[name], each) for name, each in panels.items() if each}


def _beside_vllm(files: Mapping[str, ResultsFile]) -> Iterator[Panel]:
    for name in BESIDE:
        groups: dict[str, list[Bar]] = {}
        for line, row in _beside_peer(files[name]) if name in files else ():
            groups.setdefault(_group_of(row), []).append(_ratio_bar(line, row))
        if groups:
            note = _provenance(files[name])
            yield Panel(SECTIONS[name].title, note, "ratio", 1.0, list(groups.values()))


def _beside_peer(file: ResultsFile) -> list[tuple[Line, Row]]:
    """The lines that the table shows as well, with the row that has vLLM."""
    return [
        (line, row)
        for line in lines_of(file.rows)
        for row in line.beside
        if str(row.peer).startswith("vllm")
        and row.ratio is not None
        and not row.metric.startswith("share of")
        and not row.case.startswith(LEFT_OUT)
    ]


def _group_of(row: Row) -> str:
    """Over HTTP what was asked at once, else what was measured."""
    concurrency = re.search(r"_c\d+$", row.case)
    return concurrency[0] if concurrency is not None else row.metric.partition(",")[0]


def _provenance(file: ResultsFile) -> str:
    where = f"commit {file.short_sha}, {file.date[:10]}, {file.machine}"
    return "; ".join(filter(None, (where, SECTIONS[file.name].measured(file))))


def _ratio_bar(line: Line, row: Row) -> Bar:
    assert row.ratio is not None
    said = f"{ratio(row)}: {number(row.ours)} / {amount(row.peer_value, row.unit)}"
    colour = BETTER if row.ratio >= 1 else WORSE
    missed = ", missed" if line.is_missed else ""
    said_colour = INK if row.ratio >= 1 else WORSE
    return Bar(_label(row), row.ratio, said + missed, colour, line.is_missed, said_colour)


def _label(row: Row) -> str:
    short = next((SHORT[start] for start in SHORT if row.metric.startswith(start)), row.metric)
    label = ", ".join((short, *qualifiers(row.case, row.metric)))
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"


def _tiers(files: Mapping[str, ResultsFile]) -> Iterator[Panel]:
    if TIERED not in files:
        return
    lines, note = lines_of(files[TIERED].rows), _provenance(files[TIERED])
    exact = files[EXACT].rows if EXACT in files else ()
    steps = [
        list(_step_bars(line, exact))
        for line in lines
        if line.rows[0].metric.startswith(DECODE_STEP)
    ]
    if steps:
        yield Panel("Time of a decode step", note, "ms", 0.0, steps)
    fits = [line for line in lines if line.case.startswith(FIT) and line.beside]
    if fits:
        note = fits[0].rows[0].metric
        yield Panel("Tokens that fit", note, "tokens", 0.0, [list(_fit_bars(fits))])


def _step_bars(line: Line, exact: Iterable[Row]) -> Iterator[Bar]:
    """Exact mode as the run of tiers measured it, else as its own run did."""
    row = line.rows[0]
    where = next(qualifiers(row.case, ""), row.case)
    made_up = "; keys and values made up" if "made up" in row.metric else ""
    said = amount(row.ours, row.unit) + made_up
    yield Bar(f"{where}, tiers with int4", row.ours, said, OF_TIERS)
    own_run = next(
        (each for each in exact if (each.case, each.metric) == (row.case, DECODE_STEP)), None
    )
    beside = sorted(line.beside, key=lambda each: _is_exact(each), reverse=True)
    if own_run is not None and not any(map(_is_exact, beside)):
        said = f"{amount(own_run.ours, own_run.unit)}, in a run of its own"
        yield Bar(f"{where}, exact", own_run.ours, said, OF_EXACT)
    for each in beside:
        yield _peer_bar(where, each)


def _is_exact(row: Row) -> bool:
    return str(row.peer).startswith("flashray")


def _peer_bar(where: str, row: Row) -> Bar:
    assert row.peer_value is not None
    assert row.ratio is not None
    fp8 = OF_FP8_PEER if "fp8" in str(row.peer) else OF_PEER
    name, colour = ("exact", OF_EXACT) if _is_exact(row) else (str(row.peer), fp8)
    said = f"{amount(row.peer_value, row.unit)}; tiers {number(row.ratio, digits=3)}x"
    return Bar(f"{where}, {name}", row.peer_value, said, colour)


def _fit_bars(lines: Sequence[Line]) -> Iterator[Bar]:
    for line in lines:
        row = line.beside[0]
        name = next(qualifiers(row.case, ""), row.case)
        yield Bar(f"tiers with {name}", row.ours, f"{number(row.ours)}, {ratio(row)}", OF_TIERS)
    exact = lines[0].beside[0]
    assert exact.peer_value is not None
    yield Bar("exact", exact.peer_value, number(exact.peer_value), OF_EXACT)
