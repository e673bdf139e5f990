"""The pages that draw the system name files and types that exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ("architecture.md", "kubernetes.md")


@pytest.mark.parametrize("page", PAGES)
def test_linked_pages_exist(page: str) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", (DOCS / page).read_text())
    assert targets
    assert [target for target in targets if not (DOCS / target).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    named = re.findall(r"`([\w-]+/[\w./-]+\.(?:py|yaml))`", (DOCS / page).read_text())
    assert named
    assert [file for file in named if not (ROOT / file).is_file()] == []


def test_types_on_the_way_are_where_the_page_says() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| `([\w/]+)\.py` \|$", (DOCS / "architecture.md").read_text(), re.M
    )
    assert len(rows) == 8
    for name, module in rows:
        assert hasattr(importlib.import_module(module.replace("/", ".")), name), name
