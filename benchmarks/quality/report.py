"""`python -m benchmarks.quality.report benchmarks/results/kv-quality.json`: the table and pictures
of `docs/quality.md`, from the file and nothing else."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError, MeasurementFailed
from benchmarks.quality.bars import CODE, PROSE
from benchmarks.quality.pictures import along, by_bytes
from benchmarks.quality.recall import CHAT, LIST, PASSKEY
from benchmarks.results import ROOT

PAGE = ROOT / "docs/quality.md"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
BY_BYTES, ALONG = "quality.svg", "quality-by-position.svg"
FORMATS_HEAD = (
    "| format, in float32 | bytes | KL, prose | KL, code | same top token |",
    "|---|---|---|---|---|",
)
ENGINES_HEAD = (
    "| cache, in bfloat16 | KL, prose | KL, code | above the floor | same top token "
    "| found as exact | same words |",
    "|---|---|---|---|---|---|---|",
)
FORMATS, ENGINES = ("ours", "ablation", "peer"), ("noise", "engine")


def main(file: Path, page: Path = PAGE) -> None:
    """Raises MeasurementFailed for a page without a place for figures."""
    content = json.loads(file.read_text())
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise MeasurementFailed(f"expected {BEGIN} and {END} in {page}; put them back")
    figures = "\n".join(("", *figures_of(content), ""))
    page.write_text(f"{before}{BEGIN}{figures}{END}{after}")
    more = content["more"]
    page.with_name(BY_BYTES).write_text(by_bytes(more["settings"]))
    page.with_name(ALONG).write_text(along(more["settings"], more["scored_from"]))


def figures_of(content: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown: what was measured where, and all settings."""
    more = content["more"]
    texts, settings = more["texts"], more["settings"]
    scored = " and ".join(f"{texts[name]['num_scored']:,} tokens of {name}" for name in texts)
    yield f"{more['model']}, {content['gpu']}, commit {content['sha'][:7]}: {scored}."
    yield ""
    yield from FORMATS_HEAD
    yield from (_format_line(each) for each in _of_kinds(settings, FORMATS))
    yield ""
    yield from ENGINES_HEAD
    yield from (_engine_line(each) for each in _of_kinds(settings, ENGINES))
    yield ""
    yield f"Right answers of the exact cache: {_shares(more['exact_recall'], 'right')}."
    yield ""
    yield f"![KL of each cache by the bytes of a cold token]({BY_BYTES})"
    yield ""
    yield f"![KL of each cache by position]({ALONG})"


def _of_kinds(settings: Mapping[str, Any], kinds: Sequence[str]) -> list[Mapping[str, Any]]:
    found = [each for each in settings.values() if each["kind"] in kinds]
    return sorted(found, key=lambda each: kinds.index(each["kind"]))


def _format_line(setting: Mapping[str, Any]) -> str:
    title = f"**{setting['title']}**" if setting["kind"] == "ours" else setting["title"]
    return _line(title, f"{setting['bytes']:g}", *_kls(setting, "kl"), _top1(setting))


def _engine_line(setting: Mapping[str, Any]) -> str:
    above = "; ".join(_kls(setting, "kl_above_floor"))
    answers = (_shares(setting["recall"], share) for share in ("equal", "same"))
    return _line(setting["title"], *_kls(setting, "kl"), above, _top1(setting), *answers)


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _kls(setting: Mapping[str, Any], figure: str) -> list[str]:
    """Prose and code; nothing where there is no such figure."""
    found = [setting[name].get(figure) for name in (PROSE, CODE)]
    return [_interval(each) for each in found if each is not None]


def _top1(setting: Mapping[str, Any]) -> str:
    """The share of tokens that stay the likeliest."""
    return f"{min(setting[name]['top1'][0] for name in (PROSE, CODE)):.1%}"


def _shares(recall: Mapping[str, Any], share: str) -> str:
    """Of passkeys, of the list, of the chat."""
    return ", ".join(f"{recall[f'{kind}_{share}']:.0%}" for kind in (PASSKEY, LIST, CHAT))


def _interval(kl: tuple[float, float, float]) -> str:
    mean, low, high = (_short(each) for each in kl)
    return f"{mean} ({low} to {high})"


def _short(kl: float) -> str:
    """Such as `.00085`; what is above the floor may be below zero."""
    size = abs(kl)
    digits = f"{kl:.6f}" if size < 1e-4 else f"{kl:.5f}" if size < 1e-2 else f"{kl:.3f}"
    return digits.replace("0.", ".", 1)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BenchmarkError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")
