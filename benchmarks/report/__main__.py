"""`python -m benchmarks.report`: docs/performance.md and its pictures, from the files in
benchmarks/results and nothing else."""

import sys
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.report.page import page_of
from benchmarks.report.pictures import SHOWS, pictures_of
from benchmarks.report.results_file import read_all
from benchmarks.results import RESULTS, ROOT

PAGE = "performance.md"
PICTURES = "performance-*.svg"


def report(results: Path) -> dict[str, str]:
    """What to write, by file name. Raises UnreadableResults."""
    files = read_all(results)
    pictures = pictures_of(files)
    page = page_of(files, {name: SHOWS[name] for name in pictures})
    return {PAGE: page, **pictures}


def write(results: Path, docs: Path) -> None:
    """Pictures that are no longer made are removed."""
    made = report(results)
    for old in docs.glob(PICTURES):
        old.unlink()
    for name, content in made.items():
        (docs / name).write_text(content)


def main() -> int:
    try:
        write(ROOT / RESULTS, ROOT / "docs")
    except BenchmarkError as exc:
        print(f"{type(exc).__name__}: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
