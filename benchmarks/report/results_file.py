"""The files that benchmarks wrote, read back and checked."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from benchmarks.errors import UnreadableResults
from benchmarks.results import Row

# Of answers, not of speed: they have pages of their own.
ELSEWHERE = ("cache-dropout", "kv-quality", "kv-certificate")
TEXT, NUMBER = (str,), (int, float)
TYPES: dict[str, tuple[type, ...]] = {
    "case": TEXT,
    "metric": TEXT,
    "unit": TEXT,
    "better": TEXT,
    "ours": NUMBER,
    "peer": (*TEXT, NoneType),
    "peer_value": (*NUMBER, NoneType),
    "floor": (*NUMBER, NoneType),
    "floor_of": TEXT,
}
CHOICES = {"better": ("lower", "higher"), "floor_of": ("value", "ratio")}


@dataclass(frozen=True, slots=True)
class ResultsFile:
    """`failed`: of each process that gave no numbers, why. `content`: all that the file has."""

    name: str
    sha: str
    date: str
    machine: str
    versions: Mapping[str, str]
    command: str
    rows: tuple[Row, ...]
    failed: Mapping[str, str]
    content: Mapping[str, Any]

    @property
    def short_sha(self) -> str:
        return self.sha[:7] + ("+dirty" if self.sha.endswith("+dirty") else "")


def read_all(folder: Path) -> dict[str, ResultsFile]:
    """By name, those of speed. Raises UnreadableResults, also where there is none."""
    files = [file for file in sorted(folder.glob("*.json")) if file.stem not in ELSEWHERE]
    found = {file.stem: read(file) for file in files}
    if not found:
        raise UnreadableResults(f"expected *.json in {folder}, found none; run a benchmark first")
    return found


def read(file: Path) -> ResultsFile:
    """Raises UnreadableResults, which names the file and the row."""
    try:
        content = json.loads(file.read_text())
        return ResultsFile(
            name=file.stem,
            sha=content["sha"],
            date=content["date"],
            machine=content.get("gpu") or content["cpu"],
            versions=dict(content["versions"]),
            command=content["command"],
            rows=tuple(_row(index, each) for index, each in enumerate(content["rows"])),
            failed=dict(content.get("failed", {})),
            content=content,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
        raise UnreadableResults(
            f"expected a file as benchmarks/results.py writes it, {file} is none "
            f"({type(exc).__name__}: {exc}); measure again, or remove it"
        ) from exc


def _row(index: int, found: Mapping[str, Any]) -> Row:
    for name, types in TYPES.items():
        value = found[name]
        if not isinstance(value, types) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"row {index}: {name} is {value!r}")
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"row {index}: {name} is {value!r}, none of {CHOICES[name]}")
    return Row(**{field.name: found[field.name] for field in fields(Row)})
