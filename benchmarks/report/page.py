"""The page, as Markdown: pictures, missed bars, then a table for each file."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.report.line import Line, amount, bar, lines_of, ratio
from benchmarks.report.results_file import ResultsFile
from benchmarks.report.sections import Section, in_order
from benchmarks.results import Row

COMMAND = "python -m benchmarks.report"
HEAD = "| what | ours | beside | ratio | bar |"
HEAD_OF_MISSED = "| missed | ours | beside | ratio | bar |"
RULE = "|---|---|---|---|---|"
VERDICTS = {True: "met", False: "**MISSED**", None: "nothing to hold it against"}


def page_of(files: Mapping[str, ResultsFile], pictures: Mapping[str, str]) -> str:
    """`pictures`: what they show, by file name."""
    return "\n".join((*_top(files, pictures), *_sections(files)))


def _top(files: Mapping[str, ResultsFile], pictures: Mapping[str, str]) -> Iterator[str]:
    yield f"<!-- `{COMMAND}` makes this page from benchmarks/results/*.json: edit nothing here. -->"
    yield "# How fast"
    yield ""
    yield (
        "Flashray beside its peers: in one run, on one machine, with the same input "
        "([how](benchmarks.md)). A ratio above 1 says that ours is better. A bar is what we "
        "hold ourselves to."
    )
    for name, shows in pictures.items():
        yield f"\n![{shows}]({name})"
    yield ""
    yield from _missed(files)


def _missed(files: Mapping[str, ResultsFile]) -> Iterator[str]:
    sections = [(section, lines_of(file.rows)) for section, file in in_order(files)]
    held = [row for _, lines in sections for line in lines for row in line.held]
    num_met = sum(row.meets_floor is True for row in held)
    num_missed = sum(row.meets_floor is False for row in held)
    num_open = len(held) - num_met - num_missed
    open_ones = f", {num_open} had nothing to be held against" if num_open else ""
    yield f"**{num_met} of {len(held)} bars are met, {num_missed} missed{open_ones}.**"
    if num_missed:
        yield from ("", HEAD_OF_MISSED, RULE)
    for section, lines in sections:
        link = f"[{section.title}](#{_anchor(section.title)})"
        yield from (_table_line(line, f"{link}: ") for line in lines if line.is_missed)


def _sections(files: Mapping[str, ResultsFile]) -> Iterator[str]:
    for section, file in in_order(files):
        yield from ("", f"## {section.title}", "")
        if section.said:
            yield from (section.said, "")
        if measured := section.measured(file):
            yield from (f"{measured[0].upper()}{measured[1:]}.", "")
        yield from _tables(section, file)
        yield from _provenance(file)
    yield ""


def _tables(section: Section, file: ResultsFile) -> Iterator[str]:
    lines = lines_of(file.rows)
    shown = [line for line in lines if _is_shown(line, lines, section)]
    yield from _table(shown)
    rest = [line for line in lines if line not in shown]
    if rest:
        yield f"<details><summary>{len(rest)} more figure{'s' * (len(rest) > 1)}</summary>\n"
        yield from _table(rest)
        yield "</details>\n"


def _is_shown(line: Line, lines: Sequence[Line], section: Section) -> bool:
    """What has a bar, or a peer and no bar on another figure of the case."""
    if line.held or section.only_bars:
        return bool(line.held)
    return bool(line.beside) and not any(other.held for other in lines if other.case == line.case)


def _table(lines: Iterable[Line]) -> Iterator[str]:
    rows = [_table_line(line) for line in lines]
    if rows:
        yield from (HEAD, RULE, *rows, "")


def _table_line(line: Line, before: str = "") -> str:
    beside = line.beside
    cells = (
        f"{before}{_plain(line.named)}",
        line.ours,
        "<br>".join(_plain(f"{row.peer}: {amount(row.peer_value, row.unit)}") for row in beside),
        "<br>".join(ratio(row) for row in beside),
        "<br>".join(f"{_bar(line, row)}: {VERDICTS[row.meets_floor]}" for row in line.held),
    )
    return f"| {' | '.join(cells)} |"


def _bar(line: Line, row: Row) -> str:
    is_one_of_many = row.floor_of == "ratio" and len(line.beside) > 1
    return f"beside {_plain(str(row.peer))} {bar(row)}" if is_one_of_many else bar(row)


def _provenance(file: ResultsFile) -> Iterator[str]:
    for process, why in file.failed.items():
        yield f"**No numbers of {_plain(process)}**: {_plain(why)}\n"
    versions = ", ".join(f"{name} {version}" for name, version in file.versions.items())
    link = f"[{file.name}.json](../benchmarks/results/{file.name}.json)"
    yield f"{link}: commit {file.short_sha}, {file.date}, {file.machine}; {versions}."
    yield f"\n`{file.command}`"


def _anchor(title: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _plain(said: str) -> str:
    """Without what Markdown would take for a table or HTML."""
    return " ".join(said.replace("|", "\\|").replace("<", "&lt;").split())
