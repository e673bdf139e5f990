"""Limits of size are code: a file is read in one sitting, a function is seen whole."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cluster", "deployments", "engine", "kernels", "router")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120


def sources() -> list[Path]:
    return sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))


def functions(file: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(ROOT)))
def test_size(file: Path):
    assert len(file.read_text().splitlines()) <= MAX_FILE_LINES
    limit = MAX_KERNEL_LINES if file.name == "kernel.py" else MAX_FUNCTION_LINES
    too_long = {name: lines for name, lines in functions(file) if lines > limit}
    assert too_long == {}
