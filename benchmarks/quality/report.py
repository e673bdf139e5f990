"""`python -m benchmarks.quality.report benchmarks/results/kv-quality.json`: the table and pictures
of `docs/quality.md`, from the file and nothing else."""

import json
import sys
from collections.abc import Iterator, Mapping
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
HEAD = (
    "| cache | bytes | KL, prose | KL, code | same top token | passkey, list, chat as exact |",
    "|---|---|---|---|---|---|",
)
KINDS = ("ours", "ablation", "peer", "engine", "noise")


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
    yield from HEAD
    for kind in KINDS:
        for setting in settings.values():
            if setting["kind"] == kind:
                yield _line(setting)
    yield ""
    yield f"![KL of each cache by the bytes of a cold token]({BY_BYTES})"
    yield ""
    yield f"![KL of each cache by position]({ALONG})"


def _line(setting: Mapping[str, Any]) -> str:
    kls = (_interval(setting[name]["kl"]) for name in (PROSE, CODE))
    top1 = min(setting[name]["top1"][0] for name in (PROSE, CODE))
    recall = setting["recall"]
    equal = (f"{recall[f'{kind}_equal']:.0%}" for kind in (PASSKEY, LIST, CHAT))
    title = f"**{setting['title']}**" if setting["kind"] == "ours" else setting["title"]
    cells = (title, f"{setting['bytes']:g}", *kls, f"{top1:.1%}", ", ".join(equal))
    return f"| {' | '.join(cells)} |"


def _interval(kl: tuple[float, float, float]) -> str:
    mean, low, high = (_short(each) for each in kl)
    return f"{mean} ({low} to {high})"


def _short(kl: float) -> str:
    """Such as `.00085`: two digits that count."""
    digits = f"{max(kl, 0.0):.6f}" if kl < 1e-4 else f"{kl:.5f}" if kl < 1e-2 else f"{kl:.3f}"
    return digits.removeprefix("0")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BenchmarkError as exc:
        sys.exit(f"{type(exc).__name__}: {exc}")
