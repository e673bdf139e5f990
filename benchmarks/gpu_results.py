"""The file of a benchmark on a GPU host, which may have no git: the caller says which commit it
copied there."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.nvidia_smi import query_gpu
from benchmarks.results import Row

PACKAGES = ("torch", "triton")
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")


def write_gpu_results(
    file: Path, sha: str, command: str, rows: Sequence[Row], more: Mapping[str, object]
) -> None:
    """As benchmarks/results.py does, and the driver and clocks of the GPU. `more` has what else
    this benchmark says: shapes, samples, versions of peers."""
    driver, *clocks = query_gpu("driver_version", *CLOCKS)
    python = ".".join(map(str, sys.version_info[:3]))
    content = {
        "sha": sha,
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "gpu": torch.cuda.get_device_name(),
        "clocks": dict(zip(CLOCKS, clocks, strict=True)),
        "versions": {
            "python": python,
            **{package: version(package) for package in PACKAGES},
            "cuda": torch.version.cuda,
            "driver": driver,
        },
        "command": command,
        **more,
        "rows": [row.as_json() for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
