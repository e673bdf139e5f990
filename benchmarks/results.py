"""One file of rows per benchmark, written only behind a green gate: the correctness tests of what
is measured passed first, and the measured code is the commit that the file names."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self

from benchmarks.errors import DirtyTree
from benchmarks.gate import require_passing

ROOT = Path(__file__).parents[1]
MEASURED_FOLDERS = ("benchmarks", "cluster", "deployments", "engine", "kernels", "router")
RESULTS = "benchmarks/results"
GATE_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Row:
    """`floor` is the bar: on `ours` in `unit` (at most, where lower is better), or on the ratio to
    the peer. `peer` None: nobody was measured beside."""

    case: str
    metric: str
    unit: str
    better: Literal["lower", "higher"]
    ours: float
    peer: str | None = None
    peer_value: float | None = None
    floor: float | None = None
    floor_of: Literal["value", "ratio"] = "value"

    @property
    def ratio(self) -> float | None:
        """Above 1, ours is better."""
        if self.peer_value is None:
            return None
        over, under = (
            (self.ours, self.peer_value)
            if self.better == "higher"
            else (self.peer_value, self.ours)
        )
        return over / under if under > 0 else None

    @property
    def meets_floor(self) -> bool | None:
        """None where there is no bar, or nothing to hold against it."""
        if self.floor is None:
            return None
        if self.floor_of == "ratio":
            return None if self.ratio is None else self.ratio >= self.floor
        return self.ours >= self.floor if self.better == "higher" else self.ours <= self.floor

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True, slots=True)
class Recording:
    """Opened before anything is measured, written after."""

    name: str
    root: Path
    head: str
    is_dirty: bool
    allow_dirty: bool

    @classmethod
    def open(
        cls,
        name: str,
        gate: Sequence[str],
        *,
        allow_dirty: bool = False,
        root: Path = ROOT,
        gate_timeout_s: float = GATE_TIMEOUT_S,
    ) -> Self:
        """Run the tests of `gate` (pytest node ids). Raises DirtyTree, GateRed."""
        head = _git(root, "rev-parse", "HEAD")
        changed = _changes_since(root, head)
        if changed and not allow_dirty:
            raise DirtyTree(
                "expected the measured folders as committed, these differ: "
                f"{', '.join(changed)}; commit them, or pass --allow-dirty"
            )
        require_passing("pytest", ["-q", "-x", *gate], root, gate_timeout_s)
        return cls(name, root, head, bool(changed), allow_dirty)

    def write(
        self, rows: Sequence[Row], versions: Mapping[str, str], command: str, gpu: str | None = None
    ) -> Path:
        """Raises DirtyTree when the measured folders changed meanwhile."""
        changed = _changes_since(self.root, self.head)
        if changed and not self.allow_dirty:
            raise DirtyTree(f"changed while it was measured: {', '.join(changed)}; measure again")
        content = {
            "sha": self.head + ("+dirty" if changed or self.is_dirty else ""),
            "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            **({"gpu": gpu} if gpu else {"cpu": cpu_name()}),
            "versions": dict(versions),
            "command": command,
            "rows": [row.as_json() for row in rows],
        }
        file = self.root / RESULTS / f"{self.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
        return file


def describe_tree(root: Path) -> str:
    """The commit, with `+dirty` where the measured folders differ. Raises DirtyTree without git."""
    head = _git(root, "rev-parse", "HEAD")
    return head + ("+dirty" if _changes_since(root, head) else "")


def cpu_name() -> str:
    """Such as `Intel(R) Xeon(R) CPU @ 2.10GHz, 2 cores`."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"


def _changes_since(root: Path, head: str) -> list[str]:
    """Files of the measured folders that are not as in commit `head`, untracked ones included."""
    where = ("--", *MEASURED_FOLDERS, f":(exclude){RESULTS}")
    differing = _git(root, "diff", "--name-only", head, *where).splitlines()
    untracked = _git(root, "ls-files", "--others", "--exclude-standard", *where).splitlines()
    return sorted({*differing, *untracked})


def _git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    if ran.returncode != 0:
        raise DirtyTree(f"expected a git tree in {root}: git {arguments[0]} said {ran.stderr}")
    return ran.stdout.strip()
