"""The page of speed is what its command makes from the files, and hides nothing of them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.errors import UnreadableResults
from benchmarks.report import __main__ as command
from benchmarks.report.bars import RIGHT, WIDTH, Bar, Panel, picture
from benchmarks.report.line import amount, bar, lines_of, number, qualifiers
from benchmarks.report.pictures import BESIDE_VLLM, BETTER, TIERS, WORSE
from benchmarks.report.results_file import read_all
from benchmarks.results import RESULTS, ROOT, Row

SVG = "{http://www.w3.org/2000/svg}"
DOCS = ROOT / "docs"
MET = Row("met", "a wait, median", "ms", "lower", 2.0, "vllm 1.0", 4.0, 1.5, "ratio")
MISSED = Row("late_c8", "a wait | median", "ms", "lower", 9.0, "vllm 1.0", 4.5, 8.0)
ALONE = Row("alone", "tokens in all", "count", "higher", 12_345.0)
UNHELD = Row("unheld", "a rate without a peer", "tok/s", "higher", 5.0, None, None, 1.0, "ratio")
WIDE = 7.3  # pixels of a letter, at most


def content(*rows: Row, **more: object) -> dict[str, object]:
    return {
        "sha": "0123456789abcdef",
        "date": "2026-11-30T00:00:00Z",
        "gpu": "a GPU",
        "versions": {"torch": "2.11.0"},
        "command": "python -m benchmarks.made_up",
        "rows": [row.as_json() for row in rows],
        **more,
    }


def made(folder: Path, **files: Mapping[str, object]) -> dict[str, str]:
    for name, each in files.items():
        (folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(each))
    return command.report(folder)


def rects(document: str) -> Iterator[ElementTree.Element]:
    yield from list(ElementTree.fromstring(document).iter(f"{SVG}rect"))[1:]


def test_the_page_in_the_tree_is_what_the_command_makes() -> None:
    made_now = command.report(ROOT / RESULTS)
    there = {file.name: file.read_text() for file in DOCS.glob(command.PICTURES)}
    there[command.PAGE] = (DOCS / command.PAGE).read_text()
    assert there.keys() == made_now.keys()
    stale = [name for name in made_now if there[name] != made_now[name]]
    assert stale == [], "results changed: run `python -m benchmarks.report`"


def test_every_file_and_every_missed_bar_of_the_tree_is_on_the_page() -> None:
    page = (DOCS / command.PAGE).read_text()
    files = read_all(ROOT / RESULTS)
    lines = [line for file in files.values() for line in lines_of(file.rows)]
    assert all(f"(../benchmarks/results/{name}.json)" in page for name in files)
    assert all(f"{file.command}`" in page for file in files.values())
    assert all(line.named.replace("|", "\\|") in page for line in lines)
    missed = sum(row.meets_floor is False for file in files.values() for row in file.rows)
    assert f"{missed} missed" in page
    summary = page.partition("\n## ")[0]
    assert summary.count("MISSED") == missed
    assert page.count("MISSED") == 2 * missed


def test_bars_missed_met_open_and_none(tmp_path: Path) -> None:
    page = made(tmp_path, speed=content(MET, MISSED, ALONE, UNHELD))["performance.md"]
    before, _, tables = page.partition("\n## speed\n")
    assert "**1 of 3 bars are met, 1 missed, 1 had nothing to be held against.**" in before
    missed = (
        "a wait \\| median, 8 at once `late_c8` | 9 ms | vllm 1.0: 4.500 ms | 0.500x | "
        "at most 8 ms: **MISSED** |"
    )
    assert f"| [speed](#speed): {missed}" in before
    assert "met" not in before.partition("MISSED")[2]
    shown, _, folded = tables.partition("<details>")
    assert f"\n| {missed}" in shown
    assert "| a wait, median `met` | 2 ms | vllm 1.0: 4 ms | 2x | at least 1.5x: met |" in shown
    assert "`unheld` | 5 tok/s |  |  | at least 1x: nothing to hold it against |" in shown
    assert "| tokens in all `alone` | 12,345 |  |  |  |" in folded
    assert "1 more figure<" in tables
    assert "commit 0123456, 2026-11-30T00:00:00Z, a GPU; torch 2.11.0." in folded
    assert "`python -m benchmarks.made_up`" in folded


def test_rows_of_one_value_are_one_line() -> None:
    beside = Row("step", "a step", "ms", "lower", 2.0, "vllm", 4.0, 1.0, "ratio")
    alone = Row("step", "a step, alone", "ms", "lower", 2.0, floor=3.0)
    exact = Row("step_vs_exact", "a step", "ms", "lower", 2.0, "exact", 3.0)
    other = Row("step", "another", "ms", "lower", 2.0)
    later = Row("step", "a step", "ms", "lower", 2.5)
    lines = lines_of([beside, other, alone, exact, later])
    assert [line.rows for line in lines] == [(beside, alone, exact), (other,), (later,)]
    assert [row.peer for row in lines[0].beside] == ["vllm", "exact"]
    assert lines[0].held == (beside, alone)


def test_of_many_peers_the_held_one_is_named(tmp_path: Path) -> None:
    eager = Row(MET.case, MET.metric, "ms", "lower", 2.0, "eager <1>", 8.0)
    page = made(tmp_path, speed=content(MET, eager))["performance.md"]
    assert (
        "| vllm 1.0: 4 ms<br>eager &lt;1>: 8 ms | 2x<br>4x | beside vllm 1.0 at least 1.5x: met |"
    ) in page


def test_a_process_that_gave_no_numbers_is_named(tmp_path: Path) -> None:
    page = made(tmp_path, speed=content(MET, failed={"vllm": "out of\nmemory"}))["performance.md"]
    assert "**No numbers of vllm**: out of memory" in page


def test_a_dirty_commit_says_so(tmp_path: Path) -> None:
    page = made(tmp_path, speed=content(MET, sha="0123456789+dirty"))["performance.md"]
    assert "commit 0123456+dirty" in page


def test_without_files_of_the_engine_there_are_no_pictures(tmp_path: Path) -> None:
    assert list(made(tmp_path, speed=content(MET))) == ["performance.md"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        (json.dumps({**content(MET), "sha": None, "rows": 3}), "TypeError"),
        (json.dumps({key: value for key, value in content().items() if key != "gpu"}), "'cpu'"),
        (json.dumps(content() | {"rows": [MET.as_json() | {"ours": "fast"}]}), "row 0: ours"),
        (json.dumps(content() | {"rows": [MET.as_json() | {"ours": float("nan")}]}), "row 0: ours"),
        (json.dumps(content() | {"rows": [MET.as_json() | {"better": "new"}]}), "row 0: better"),
        (json.dumps(content() | {"rows": [{"case": "x"}]}), "'metric'"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, broken: str, why: str) -> None:
    (tmp_path / "broken.json").write_text(broken)
    with pytest.raises(UnreadableResults, match=r"broken\.json is none") as raised:
        made(tmp_path, speed=content(MET))
    assert why in str(raised.value)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableResults, match="found none"):
        command.report(tmp_path)


def test_an_unreadable_file_leaves_the_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, docs = tmp_path / RESULTS, tmp_path / "docs"
    results.mkdir(parents=True)
    docs.mkdir()
    (results / "speed.json").write_text(json.dumps(content(MET)))
    (docs / "performance-old.svg").write_text("")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command.main() == 0
    assert [file.name for file in docs.iterdir()] == ["performance.md"]
    before = (docs / "performance.md").read_text()
    (results / "broken.json").write_text("{")
    assert command.main() == 1
    assert "UnreadableResults: expected a file" in capsys.readouterr().err
    assert (docs / "performance.md").read_text() == before


def test_the_picture_beside_vllm(tmp_path: Path) -> None:
    tied = Row("tied", "a wait, mean", "ms", "lower", 4.0, "vllm 1.0", 4.0, 1.0, "ratio")
    other = Row("other", "a wait, worst", "ms", "lower", 4.0, "FlashAttention 3", 4.0)
    shown = made(tmp_path, engine_exact_h200=content(MET, MISSED, tied, other))[BESIDE_VLLM]
    drawn = list(rects(shown))
    assert [each.get("stroke") for each in drawn] == [BETTER, BETTER, WORSE]
    assert [each.get("fill") for each in drawn] == [BETTER, BETTER, "#ffffff"]
    better, equal, worse = [(float(x.get("x", 0)), float(x.get("width", 0))) for x in drawn]
    assert worse[0] + worse[1] == pytest.approx(better[0])
    assert equal == (better[0], 0.0)
    assert "0.500x: 9 / 4.500 ms, missed" in shown
    assert "commit 0123456, 2026-11-30, a GPU" in shown


def test_the_picture_of_tiers(tmp_path: Path) -> None:
    step = "time of a decode step"
    tiers = content(
        Row("step_b2_1k_vs_exact", step, "ms", "lower", 2.0, "flashray, exact", 4.0, 1.9, "ratio"),
        Row("step_b2_1k", step, "ms", "lower", 2.0, "vllm 1.0", 5.0),
        Row("tpot_b1_8k", step, "ms", "lower", 3.0, "vllm 1.0", 6.0, 4.0),
        Row("tokens_fit_int4_vs_exact", "tokens in 1 GiB", "tokens", "higher", 90.0, "e", 30.0),
    )
    exact = content(Row("tpot_b1_8k", step, "ms", "lower", 4.0, "vllm 1.0", 5.0))
    shown = made(tmp_path, kv_engine_h200=tiers, engine_exact_h200=exact)[TIERS]
    titles = [each.text for each in ElementTree.fromstring(shown).iter(f"{SVG}title")]
    assert titles == [
        "2 x 1K, tiers with int4: 2 ms",
        "2 x 1K, exact: 4 ms; tiers 2x",
        "2 x 1K, vllm 1.0: 5 ms; tiers 2.50x",
        "1 x 8K, tiers with int4: 3 ms",
        "1 x 8K, exact: 4 ms, in a run of its own",
        "1 x 8K, vllm 1.0: 6 ms; tiers 2x",
        "tiers with int4: 90, 3x",
        "exact: 30",
    ]


@pytest.mark.parametrize("name", [BESIDE_VLLM, TIERS])
def test_pictures_of_the_tree_hold_what_they_say_in_their_frames(name: str) -> None:
    picture = ElementTree.fromstring((DOCS / name).read_text())
    height = float(picture.get("height", 0))
    texts = list(picture.iter(f"{SVG}text"))
    assert len(texts) > 20
    for text in texts:
        x, y, said = float(text.get("x", 0)), float(text.get("y", 0)), text.text or ""
        assert 0 < y < height
        if text.get("anchor") is None and text.get("font-size") == "13":
            assert x + WIDE * len(said) * (text.get("text-anchor") == "start") < WIDTH, said
    for rect in rects((DOCS / name).read_text()):
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= RIGHT + 0.1


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6), st.sampled_from([0.0, 1.0]))
def test_bars_of_any_length_lie_on_the_axis(values: list[float], origin: float) -> None:
    bars = [Bar("label", value, "said", BETTER) for value in values]
    drawn = picture("title", "told", [Panel("panel", "", "ms", origin, [bars])])
    for rect in rects(drawn):
        left, width = float(rect.get("x", 0)), float(rect.get("width", 0))
        assert left >= 299.9
        assert width >= 0
        assert left + width <= RIGHT + 0.1


@pytest.mark.parametrize(
    ("case", "metric", "said"),
    [
        ("tpot_b1_8k", "time of a decode step", ["1 x 8K"]),
        ("tok_s_b8", "throughput", ["batch of 8"]),
        ("http_ttft_p99_c32", "time to first text, 99th percentile", ["32 at once"]),
        ("added_p50_76kb_5rps", "added latency", ["p50", "76 KB", "5 req/s"]),
        ("smollm2_tpot_1k", "time of a decode step", ["SmolLM2 135M", "1K"]),
        ("attn_mixed_32k_vs_int4", "time", ["tiers and lengths mixed", "32K"]),
        ("long_ttft_128k", "time to first token of the 128K prompt", []),
        ("short_ttft_p95_during_128k", "95th percentile of the wait", []),
        ("tokens_fit_k8v4_vs_exact", "tokens", ["k8v4"]),
        ("integrity_errors", "books that disagree", []),
    ],
)
def test_names_in_words(case: str, metric: str, said: list[str]) -> None:
    assert list(qualifiers(case, metric)) == said


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
def test_a_number_is_seen_on_its_side_of_the_bar(value: float, floor: float) -> None:
    shown = float(number(value, floor).replace(",", ""))
    assert (shown < floor) == (value < floor)
    assert (shown > floor) == (value > floor)


def test_amounts_and_bars() -> None:
    assert amount(38655.14, "tok/s") == "38,655 tok/s"
    assert amount(12.681, "ms") == "12.68 ms"
    assert amount(0.0, "count") == "0"
    assert number(0.99954, 1.0, 3) == "0.9995"
    assert number(1.0402, 1.0, 3) == "1.04"
    assert bar(Row(**asdict(MET) | {"floor": 2 / 3})) == "at least 0.667x"
    assert bar(MISSED) == "at most 8 ms"
    assert bar(ALONE) == ""
